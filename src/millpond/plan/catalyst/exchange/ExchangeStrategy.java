package millpond.plan;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.expressions.*;
import org.apache.spark.sql.catalyst.expressions.aggregate.*;
import org.apache.spark.sql.catalyst.optimizer.NormalizeFloatingNumbers$;
import org.apache.spark.sql.catalyst.plans.logical.Expand;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.MapInArrow;
import org.apache.spark.sql.execution.*;
import org.apache.spark.sql.execution.aggregate.*;
import org.apache.spark.sql.types.Metadata;
import scala.Option;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Planner strategy for the map side of an exchange, in the form chosen for the batch.
 *
 * The map side is a `MapInArrow` whose Python function has these operands:
 * - a literal "millpond-exchange:[id]:[keys]:[functions]:[copies]";
 * - the grouping keys;
 * - for each aggregate function, the function and its filter, with bound references to the columns of the copies;
 * - for each copy of a row, its further columns, which are grouping columns, too;
 * - an expression per output column over the columns below (form "rows");
 * - an expression per output column over bound references to the partial aggregate's columns (form "combined").
 * In any other form, the Python function itself runs.
 *
 * The driver compiles this class, so no jar is needed: only Spark's own classes are sent to executors. The compiler
 * does not support generics, hence the raw types.
 */
public class ExchangeStrategy extends SparkStrategy {
    private static final String TAG = "millpond-exchange:";

    /** Exchange id to form; read when a batch is planned. */
    public static final ConcurrentHashMap FORMS = new ConcurrentHashMap();

    public scala.collection.immutable.Seq apply(LogicalPlan plan) {
        List planned = new ArrayList();
        if (plan instanceof MapInArrow && ((MapInArrow) plan).functionExpr() instanceof PythonUDF) {
            MapInArrow node = (MapInArrow) plan;
            List operands = CollectionConverters.asJava(((PythonUDF) node.functionExpr()).children());
            String tag = operands.isEmpty() ? "" : operands.get(0).toString();
            if (tag.startsWith(TAG)) {
                String[] parts = tag.split(":");
                Object form = FORMS.get(parts[1]);
                if ("rows".equals(form))
                    planned.add(this.rows(node, operands));
                if ("combined".equals(form))
                    planned.add(this.combined(node, operands, Integer.parseInt(parts[2]), Integer.parseInt(parts[3]),
                        Integer.parseInt(parts[4])));
            }
        }
        return seq(planned);
    }

    /** Plan a projection of the rows (form "rows"). */
    private SparkPlan rows(MapInArrow node, List operands) {
        int width = node.output().size();
        List rows = operands.subList(operands.size() - 2 * width, operands.size() - width);
        return new ProjectExec(seq(named(rows, node)), this.planLater(node.child()));
    }

    /** Plan Spark's partial aggregation: one row per group, with the functions' buffers (form "combined"). */
    private SparkPlan combined(MapInArrow node, List operands, int keys, int functions, int copies) {
        int firstOfCopies = 1 + keys + 2 * functions;
        int firstResult = operands.size() - node.output().size();
        List ofCopies = operands.subList(firstOfCopies, firstResult - node.output().size());
        List added = addedBy(ofCopies, copies);
        LogicalPlan below = copies == 0 ? node.child() : copied(node.child(), ofCopies, copies, added);
        List groupings = new ArrayList();
        List columns = new ArrayList();
        List keyed = joined(operands.subList(1, 1 + keys), added);
        for (int i = 0; i < keyed.size(); i++) {
            // -0.0 and NaN become one value each, as in Spark's own aggregation.
            Expression key = NormalizeFloatingNumbers$.MODULE$.normalize((Expression) keyed.get(i));
            NamedExpression grouping = key instanceof NamedExpression ? (NamedExpression) key : alias(key, "key" + i);
            groupings.add(grouping);
            columns.add(grouping.toAttribute());
        }
        List calls = new ArrayList();
        List buffers = new ArrayList();
        for (int i = 0; i < functions; i++) {
            AggregateFunction function = (AggregateFunction) resolved((Expression) operands.get(1 + keys + 2 * i), added);
            Expression filter = resolved((Expression) operands.get(2 + keys + 2 * i), added);
            boolean all = filter instanceof Literal && Boolean.TRUE.equals(((Literal) filter).value());
            calls.add(new AggregateExpression(function, Partial$.MODULE$, false, Option.apply(all ? null : filter),
                NamedExpression$.MODULE$.newExprId()));
            buffers.addAll(CollectionConverters.asJava(function.aggBufferAttributes()));
            columns.addAll(CollectionConverters.asJava(function.inputAggBufferAttributes()));
        }
        SparkPlan partial = new HashAggregateExec(Option.apply(null), false, Option.apply(null), seq(groupings),
            seq(calls), seq(buffers), 0, seq(columns), this.planLater(below));
        List results = new ArrayList();
        for (int i = firstResult; i < operands.size(); i++)
            results.add(resolved((Expression) operands.get(i), columns));
        return new ProjectExec(seq(named(results, node)), partial);
    }

    /** Return the further columns of the copies of a row. */
    private static List addedBy(List ofCopies, int copies) {
        List added = new ArrayList();
        for (int i = 0; i < (copies == 0 ? 0 : ofCopies.size() / copies); i++)
            added.add(new AttributeReference("copy" + i, ((Expression) ofCopies.get(i)).dataType(), true,
                Metadata.empty(), NamedExpression$.MODULE$.newExprId(), seq(new ArrayList())));
        return added;
    }

    /** Return a plan with each row once per copy. */
    private static LogicalPlan copied(LogicalPlan below, List ofCopies, int copies, List added) {
        List columnsBelow = CollectionConverters.asJava(below.output());
        List projections = new ArrayList();
        for (int i = 0; i < copies; i++)
            projections.add(seq(joined(columnsBelow, ofCopies.subList(i * added.size(), (i + 1) * added.size()))));
        return new Expand(seq(projections), seq(joined(columnsBelow, added)), below);
    }

    /** Replace an expression's bound references by columns. */
    private static Expression resolved(Expression expression, List columns) {
        if (expression instanceof BoundReference)
            return (Expression) columns.get(((BoundReference) expression).ordinal());
        List children = CollectionConverters.asJava(expression.children());
        if (children.isEmpty()) return expression;
        List changed = new ArrayList();
        for (int i = 0; i < children.size(); i++) changed.add(resolved((Expression) children.get(i), columns));
        return (Expression) expression.withNewChildren(seq(changed));
    }

    private static List joined(List some, List others) {
        List all = new ArrayList(some);
        all.addAll(others);
        return all;
    }

    private static List named(List expressions, MapInArrow node) {
        List output = CollectionConverters.asJava(node.output());
        List results = new ArrayList();
        for (int i = 0; i < expressions.size(); i++) {
            Attribute as = (Attribute) output.get(i);
            results.add(new Alias((Expression) expressions.get(i), as.name(), as.exprId(), as.qualifier(),
                Option.apply(as.metadata()), seq(new ArrayList())));
        }
        return results;
    }

    private static Alias alias(Expression expression, String name) {
        return new Alias(expression, name, NamedExpression$.MODULE$.newExprId(), seq(new ArrayList()),
            Option.apply(null), seq(new ArrayList()));
    }

    private static scala.collection.immutable.Seq seq(List items) {
        return CollectionConverters.asScala(items).toIndexedSeq();
    }
}
