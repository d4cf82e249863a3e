"""State variables of a user's processor, learnt on the driver, as in Spark, by running its `init`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessor, ValueState
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState as State
from pyspark.sql.types import StructType

from millpond.errors import UsageError
from millpond.spec.kinds.processor import TimeMode, Variable
from millpond.spec.types import parse_type
from millpond.tasks.ddl import ddl
from millpond.worker.processors.handle import CheckedHandle
from millpond.worker.processors.state.refusals import refused, wrong_handle_state
from millpond.worker.processors.state.schemas import not_null_fields, spark_type

_VALUE = {
    "exists": "checking value state exists",
    "get": "getting value state",
    "update": "updating value state",
    "clear": "clearing value state",
}
_LIST = {
    "exists": "checking value state exists",
    "get": "getting list state",
    "put": "updating value state",
    "appendValue": "updating value state",
    "appendList": "updating value state",
    "clear": "clearing value state",
}
_MAP = {
    "exists": "checking map state exists",
    "getValue": "getting value",
    "containsKey": "checking if map state contains key",
    "updateValue": "updating map state value",
    "iterator": "getting map state",
    "keys": "getting map state",
    "values": "getting map state",
    "removeKey": "removing key from map state",
    "clear": "clearing map state",
}
_KINDS: dict[str, tuple[type, dict[str, str]]] = {
    "value": (ValueState, _VALUE),
    "list": (ListState, _LIST),
    "map": (MapState, _MAP),
}


class DeclaringHandle(CheckedHandle):
    """Handle of a processor on the driver: variables can be declared but not used.

    Attributes:
        variables: declared variables, in order.
        purged: names of variables to delete if earlier runs had them.
        full: names of variables whose values have non-nullable fields.
    """

    def __init__(self, mode: TimeMode) -> None:
        super().__init__(mode, State.PRE_INIT, self._record)
        self.variables: list[Variable] = []
        self.purged: list[str] = []
        self.full: list[str] = []

    def deleteIfExists(self, stateName: str) -> None:
        """Record that a variable of earlier runs is to be deleted."""
        super().deleteIfExists(stateName)
        self.purged.append(stateName)

    def _record(self, kind: Any, name: str, value: StructType | str, key: StructType | str, ttl_ms: int) -> Any:
        if not_null_fields(value):
            self.full.append(name)
        self.variables.append(
            Variable(name, kind, _schema_text(value), _schema_text(key) if kind == "map" else "", ttl_ms)
        )
        return _unusable(kind, name)


def declare_state(processor: StatefulProcessor, time_mode: TimeMode) -> DeclaringHandle:
    """Do as `run_init` with a copy of a processor."""
    serializer = CPickleSerializer()
    return run_init(serializer.loads(serializer.dumps(processor)), time_mode)


def run_init(processor: StatefulProcessor, time_mode: TimeMode) -> DeclaringHandle:
    """Run `init` of a processor on the driver, and close it; return its handle with its variables.

    Raises:
        PySparkRuntimeError: the processor does what Spark refuses.
    """
    handle = DeclaringHandle(time_mode)
    processor.init(handle)
    processor.close()
    return handle


def _schema_text(schema: StructType | str) -> str:
    """Return the type of a variable as the text of a struct."""
    if not isinstance(schema, str):
        return ddl(schema)
    try:
        dtype = parse_type(f"struct<{schema}>")
    except UsageError as error:
        raise refused("parsing string schema", str(error)) from None
    try:
        return ddl(spark_type(dtype))
    except KeyError:
        return f"struct<{schema}>"  # an unsupported type, which is refused later


def _unusable(kind: str, name: str) -> Any:
    """Create a variable without state, whose operations all fail."""
    base, operations = _KINDS[kind]

    def failing(operation: str, doing: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise refused(doing, wrong_handle_state(f"{name}.{operation}", State.PRE_INIT.name))

        return fail

    methods = {operation: failing(operation, doing) for operation, doing in operations.items()}
    class_: Any = type(f"Unusable{base.__name__}", (base,), methods)
    return class_.__new__(class_)
