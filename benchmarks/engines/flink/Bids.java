package millpond.benchmark;

import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.annotation.FunctionHint;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.functions.TableFunction;

/**
 * BIDS(seed, rate, base, columns, n): the bid with event number n, or nothing if that event is no bid. Bit i of
 * `columns` asks for column i. The others stay null, as Spark leaves out columns that a query does not read.
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
  private transient Made made;
  private transient StringData[] channels;
  private transient StringData[] urls;

  public void eval(long seed, long rate, long base, int columns, long n) {
    if (n % 50 < 4) {
      return;
    }
    if (made == null || made.seed != seed) {
      prepare(seed);
    }
    GenericRowData row = new GenericRowData(7);
    if ((columns & 3) != 0) {
      long drawn = made.draw(1, n);
      long last = n / 50 * 3 + 2;
      long first = Math.max(last - 100, 0);
      long any = first + Made.bits(drawn, 3, 30) % (last - first + 11);
      boolean wanted = Made.bits(made.draw(7, n), 0, 31) % 100 < 50;
      row.setField(0, 1000 + (wanted ? last / 100 * 100 : any));
      boolean hot = Made.bits(drawn, 1, 2) > 0;
      row.setField(1, 1000 + (hot ? n / 50 / 100 * 100 + 1 : Made.anyPerson(n, Made.bits(drawn, 33, 30))));
    }
    if ((columns & 4) != 0) {
      row.setField(2, made.price(2, n));
    }
    if ((columns & 24) != 0) {
      long drawn = made.draw(3, n);
      int channel = (int) (Made.bits(drawn, 1, 31) % CHANNELS);
      int site = (drawn & 1) > 0 ? channel % HOT.length : channel + HOT.length;
      row.setField(3, channels[site]);
      row.setField(4, urls[site]);
    }
    if ((columns & 32) != 0) {
      row.setField(5, TimestampData.fromEpochMillis(base + n * 1000 / rate));
    }
    if ((columns & 64) != 0) {
      row.setField(6, made.extra(n, 32, 100));
    }
    collect(row);
  }

  private void prepare(long seed) {
    made = new Made(seed);
    channels = new StringData[HOT.length + CHANNELS];
    urls = new StringData[channels.length];
    for (int site = 0; site < channels.length; site++) {
      boolean hot = site < HOT.length;
      channels[site] = StringData.fromString(hot ? HOT[site] : "channel-" + (site - HOT.length));
      long drawn = made.draw(5, site);
      StringBuilder url = new StringBuilder("https://www.nexmark.com/");
      for (int i = 0; i < 3; i++) {
        url.append(made.cut(Made.bits(drawn, 12 * i, 11), 3 + Made.bits(drawn, 12 * i + 11, 1))).append('/');
      }
      url.append("item.htm?query=1");
      if (!hot && Made.bits(drawn, 40, 16) % 10 > 0) {
        url.append("&channel_id=").append(Made.bits(made.draw(6, site), 0, 31));
      }
      urls[site] = StringData.fromString(url.toString());
    }
  }
}
