package millpond.benchmark;

import java.nio.charset.StandardCharsets;
import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.functions.ScalarFunction;

/** CUT(seed, pool, start, size): a piece of the fixed text of `pool` letters that a seed gives. */
public class Cut extends ScalarFunction {
  private static final long LETTERS = 999L;
  private transient byte[] text;
  private transient long textSeed;

  public @DataTypeHint("BYTES") byte[] eval(long seed, int pool, long start, int size) {
    if (text == null || textSeed != seed) {
      text = letters(pool, seed);
      textSeed = seed;
    }
    byte[] piece = new byte[size];
    System.arraycopy(text, (int) start, piece, 0, size);
    return piece;
  }

  static byte[] letters(int length, long seed) {
    byte[] alphabet = "abcdefghijklmnopqrstuvwxyz".getBytes(StandardCharsets.US_ASCII);
    byte[] text = new byte[length];
    for (int i = 0; i < length; i++) {
      text[i] = alphabet[(int) (Draw.draw(seed * 1000L + LETTERS, i) % alphabet.length)];
    }
    return text;
  }
}
