package millpond.benchmark;

import java.util.HashMap;
import java.util.Map;
import org.apache.flink.table.annotation.DataTypeHint;
import org.apache.flink.table.annotation.FunctionHint;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.functions.TableFunction;

/** SIDE(key): the row of a table of 10,000 rows that is kept in memory, or nothing. */
@FunctionHint(output = @DataTypeHint(value = "ROW<`value` STRING>", bridgedTo = RowData.class))
public class Side extends TableFunction<RowData> {
  private transient Map<Long, RowData> table;

  public void eval(Long key) {
    if (table == null) {
      table = new HashMap<>();
      for (long k = 0; k < 10_000; k++) {
        table.put(k, GenericRowData.of(StringData.fromString("value-" + k)));
      }
    }
    RowData row = table.get(key);
    if (row != null) {
      collect(row);
    }
  }
}
