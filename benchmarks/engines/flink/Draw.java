package millpond.benchmark;

import org.apache.flink.table.functions.ScalarFunction;

/** DRAW(stream, n): the 63 random bits of an event number, the same as in NumPy and in Spark. */
public class Draw extends ScalarFunction {
  private static final long P1 = 0x9E3779B185EBCA87L;
  private static final long P2 = 0xC2B2AE3D27D4EB4FL;
  private static final long P3 = 0x165667B19E3779F9L;
  private static final long P4 = 0x85EBCA77C2B2AE63L;
  private static final long P5 = 0x27D4EB2F165667C5L;

  public long eval(long stream, long n) {
    return draw(stream, n);
  }

  static long draw(long stream, long n) {
    return hash(n, hash(stream, 42L)) >>> 1;
  }

  private static long hash(long value, long seed) {
    long h = seed + P5 + 8L;
    h ^= Long.rotateLeft(value * P2, 31) * P1;
    h = Long.rotateLeft(h, 27) * P1 + P4;
    h ^= h >>> 33;
    h *= P2;
    h ^= h >>> 29;
    h *= P3;
    h ^= h >>> 32;
    return h;
  }
}
