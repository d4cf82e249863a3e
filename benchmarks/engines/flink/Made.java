package millpond.benchmark;

import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStream;
import org.apache.flink.table.data.StringData;

/** Texts, prices and people that persons, auctions and bids of one seed share. */
final class Made {
  private static final int TEXT = 2_048 + 640;
  final long seed;
  private final byte[] text;
  private final double[][] prices;

  Made(long seed) {
    this.seed = seed;
    text = Cut.letters(TEXT, seed);
    prices = new double[3][128];
    try (InputStream raw = Made.class.getResourceAsStream("/prices.bin");
        DataInputStream in = new DataInputStream(raw)) {
      for (double[] table : prices) {
        for (int i = 0; i < table.length; i++) {
          table[i] = in.readDouble();
        }
      }
    } catch (IOException error) {
      throw new IllegalStateException(error);
    }
  }

  static long bits(long drawn, int shift, int width) {
    return (drawn >> shift) & ((1L << width) - 1);
  }

  long draw(int stream, long n) {
    return Draw.draw(seed * 1000L + stream, n);
  }

  long price(int stream, long n) {
    long drawn = draw(stream, n);
    double power =
        prices[0][(int) bits(drawn, 14, 7)] * prices[1][(int) bits(drawn, 7, 7)] * prices[2][(int) bits(drawn, 0, 7)];
    return (long) Math.floor(power * 100.0 + 0.5);
  }

  /** Number of any of the people who are active at event n, and of a few who are still to come. */
  static long anyPerson(long n, long drawn) {
    long people = n / 50 + 1;
    long active = Math.min(people, 1000);
    return people - active + drawn % (active + 10);
  }

  String cut(long start, long size) {
    return new String(text, (int) start, (int) size, java.nio.charset.StandardCharsets.US_ASCII);
  }

  StringData piece(long start, long size) {
    return StringData.fromBytes(text, (int) start, (int) size);
  }

  /** Padding that brings an event of `size` bytes to `average`, give or take a fifth of what is missing. */
  StringData extra(long n, long size, long average) {
    long drawn = draw(4, n);
    long missing = average - size;
    long fifth = (missing + 2) / 5;
    return piece(bits(drawn, 0, 11), missing - fifth + bits(drawn, 11, 30) % (2 * fifth));
  }
}
