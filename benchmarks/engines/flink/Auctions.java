package millpond.benchmark;

import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.annotation.FunctionHint;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.functions.TableFunction;

/** AUCTIONS(seed, rate, base, columns, n): the auction with event number n, or nothing; as BIDS. */
@FunctionHint(
    output =
        @DataTypeHint(
            value =
                "ROW<id BIGINT, itemName STRING, description STRING, initialBid BIGINT, reserve BIGINT,"
                    + " dateTime TIMESTAMP(3), expires TIMESTAMP(3), seller BIGINT, category BIGINT, extra STRING>",
            bridgedTo = RowData.class))
public class Auctions extends TableFunction<RowData> {
  private static final long HORIZON = 100 * 50 / 3;
  private transient Made made;

  public void eval(long seed, long rate, long base, int columns, long n) {
    long rest = n % 50;
    if (rest < 1 || rest > 3) {
      return;
    }
    if (made == null || made.seed != seed) {
      made = new Made(seed);
    }
    GenericRowData row = new GenericRowData(10);
    row.setField(0, 1000 + n / 50 * 3 + rest - 1);
    if ((columns & 518) != 0) {
      long drawn = made.draw(23, n);
      long itemSize = 3 + Made.bits(drawn, 0, 16) % 17;
      long aboutSize = 3 + Made.bits(drawn, 16, 16) % 97;
      row.setField(1, made.piece(Made.bits(drawn, 32, 11), itemSize));
      row.setField(2, made.piece(Made.bits(drawn, 43, 11), aboutSize));
      row.setField(9, made.extra(n, 48 + itemSize + aboutSize, 500));
    }
    if ((columns & 24) != 0) {
      long initial = made.price(21, n);
      row.setField(3, initial);
      row.setField(4, initial + made.price(22, n));
    }
    long now = base + n * 1000 / rate;
    row.setField(5, TimestampData.fromEpochMillis(now));
    long horizon = base + (n + HORIZON) * 1000 / rate - now;
    row.setField(6, TimestampData.fromEpochMillis(now + 1 + made.draw(24, n) % Math.max(2 * horizon, 1)));
    long drawn = made.draw(20, n);
    boolean hot = Made.bits(drawn, 0, 2) > 0;
    row.setField(7, 1000 + (hot ? n / 50 / 100 * 100 : Made.anyPerson(n, Made.bits(drawn, 2, 30))));
    row.setField(8, 10 + Made.bits(drawn, 32, 30) % 5);
    collect(row);
  }
}
