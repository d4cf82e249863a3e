package millpond.benchmark;

import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStream;
import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.annotation.FunctionHint;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.functions.FunctionContext;
import org.apache.flink.table.functions.TableFunction;

/**
 * BIDS(seed, rate, base, columns, n): the bid with event number n, or nothing if that event is none. Bit i of `columns` asks for
 * column i; the others stay null, as Spark leaves out what a query does not read.
 */
@FunctionHint(
    output =
        @DataTypeHint(
            value =
                "ROW<auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING,"
                    + " dateTime TIMESTAMP(3), extra STRING>",
            bridgedTo = RowData.class))
public class Bids extends TableFunction<RowData> {
  private static final String[] HOT = {"Google", "Facebook", "Baidu", "Apple"};
  private static final int CHANNELS = 10_000;
  private static final int TEXT = 2_048 + 640;
  private transient double[][] prices;
  private transient byte[] text;
  private transient StringData[] channels;
  private transient StringData[] urls;
  private transient long seed;

  @Override
  public void open(FunctionContext context) throws IOException {
    prices = new double[3][128];
    try (InputStream raw = Bids.class.getResourceAsStream("/prices.bin");
        DataInputStream in = new DataInputStream(raw)) {
      for (double[] table : prices) {
        for (int i = 0; i < table.length; i++) {
          table[i] = in.readDouble();
        }
      }
    }
  }

  public void eval(long seed, long rate, long base, int columns, long n) {
    if (n % 50 < 4) {
      return;
    }
    if (text == null || this.seed != seed) {
      prepare(seed);
    }
    GenericRowData row = new GenericRowData(7);
    long person = n / 50;
    if ((columns & 3) != 0) {
      long drawn = Draw.draw(seed * 1000L + 1, n);
      long last = n / 50 * 3 + 2;
      long first = Math.max(last - 100, 0);
      row.setField(0, 1000 + ((drawn & 1) > 0 ? last / 100 * 100 : first + bits(drawn, 3, 30) % (last - first + 11)));
      long active = Math.min(person + 1, 1000);
      long any = person + 1 - active + bits(drawn, 33, 30) % (active + 10);
      row.setField(1, 1000 + (bits(drawn, 1, 2) > 0 ? person / 100 * 100 + 1 : any));
    }
    if ((columns & 4) != 0) {
      long drawn = Draw.draw(seed * 1000L + 2, n);
      double power =
          prices[0][(int) bits(drawn, 14, 7)] * prices[1][(int) bits(drawn, 7, 7)] * prices[2][(int) bits(drawn, 0, 7)];
      row.setField(2, (long) Math.floor(power * 100.0 + 0.5));
    }
    if ((columns & 24) != 0) {
      long drawn = Draw.draw(seed * 1000L + 3, n);
      int channel = (int) (bits(drawn, 1, 31) % CHANNELS);
      int site = (drawn & 1) > 0 ? channel % HOT.length : channel + HOT.length;
      row.setField(3, channels[site]);
      row.setField(4, urls[site]);
    }
    if ((columns & 32) != 0) {
      row.setField(5, TimestampData.fromEpochMillis(base + n * 1000 / rate));
    }
    if ((columns & 64) != 0) {
      long drawn = Draw.draw(seed * 1000L + 4, n);
      int missing = 68;
      int fifth = (missing + 2) / 5;
      int size = (int) (missing - fifth + bits(drawn, 11, 30) % (2 * fifth));
      row.setField(6, StringData.fromBytes(text, (int) bits(drawn, 0, 11), size));
    }
    collect(row);
  }

  private static long bits(long drawn, int shift, int width) {
    return (drawn >> shift) & ((1L << width) - 1);
  }

  private void prepare(long seed) {
    text = Cut.letters(TEXT, seed);
    channels = new StringData[HOT.length + CHANNELS];
    urls = new StringData[channels.length];
    for (int site = 0; site < channels.length; site++) {
      boolean hot = site < HOT.length;
      channels[site] = StringData.fromString(hot ? HOT[site] : "channel-" + (site - HOT.length));
      long drawn = Draw.draw(seed * 1000L + 5, site);
      StringBuilder url = new StringBuilder("https://www.nexmark.com/");
      for (int i = 0; i < 3; i++) {
        int start = (int) bits(drawn, 12 * i, 11);
        int size = 3 + (int) bits(drawn, 12 * i + 11, 1);
        url.append(new String(text, start, size, java.nio.charset.StandardCharsets.US_ASCII)).append('/');
      }
      url.append("item.htm?query=1");
      if (!hot && bits(drawn, 40, 16) % 10 > 0) {
        url.append("&channel_id=").append(bits(Draw.draw(seed * 1000L + 6, site), 0, 31));
      }
      urls[site] = StringData.fromString(url.toString());
    }
    this.seed = seed;
  }
}
