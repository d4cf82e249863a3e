package millpond.benchmark;

import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.annotation.FunctionHint;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.functions.TableFunction;

/** PERSONS(seed, rate, base, columns, n): the person with event number n, or nothing; as BIDS. */
@FunctionHint(
    output =
        @DataTypeHint(
            value =
                "ROW<id BIGINT, name STRING, emailAddress STRING, creditCard STRING, city STRING, state STRING,"
                    + " dateTime TIMESTAMP(3), extra STRING>",
            bridgedTo = RowData.class))
public class Persons extends TableFunction<RowData> {
  private static final String[] FIRST = {
    "Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"
  };
  private static final String[] LAST = {
    "Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"
  };
  private static final String[] CITIES = {
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"
  };
  private static final String[] STATES = {"AZ", "CA", "ID", "OR", "WA", "WY"};
  private transient Made made;

  public void eval(long seed, long rate, long base, int columns, long n) {
    if (n % 50 != 0) {
      return;
    }
    if (made == null || made.seed != seed) {
      made = new Made(seed);
    }
    long drawn = made.draw(10, n);
    GenericRowData row = new GenericRowData(8);
    row.setField(0, 1000 + n / 50);
    row.setField(6, TimestampData.fromEpochMillis(base + n * 1000 / rate));
    String name = pick(FIRST, drawn, 0) + " " + pick(LAST, drawn, 15);
    String city = pick(CITIES, drawn, 30);
    String state = pick(STATES, drawn, 45);
    row.setField(1, StringData.fromString(name));
    row.setField(4, StringData.fromString(city));
    row.setField(5, StringData.fromString(state));
    if ((columns & 140) != 0) {
      long mailDrawn = made.draw(12, n);
      String user = made.cut(Made.bits(mailDrawn, 0, 11), 3 + Made.bits(mailDrawn, 11, 2));
      String host = made.cut(Made.bits(mailDrawn, 13, 11), 3 + Made.bits(mailDrawn, 24, 1));
      String mail = user + "@" + host + ".com";
      long cardDrawn = made.draw(11, n);
      StringBuilder card = new StringBuilder();
      for (int k = 0; k < 60; k += 15) {
        String group = Long.toString(10_000 + Made.bits(cardDrawn, k, 15) % 10_000);
        card.append(k == 0 ? "" : " ").append(group, 1, 5);
      }
      row.setField(2, StringData.fromString(mail));
      row.setField(3, StringData.fromString(card.toString()));
      long size = 8 + name.length() + mail.length() + card.length() + city.length() + state.length();
      row.setField(7, made.extra(n, size, 200));
    }
    collect(row);
  }

  private static String pick(String[] names, long drawn, int shift) {
    return names[(int) (Made.bits(drawn, shift, 15) % names.length)];
  }
}
