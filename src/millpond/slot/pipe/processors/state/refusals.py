"""What Spark's own state handle refuses, in its words: it raises one class, whose text has the error class."""

from __future__ import annotations

from decimal import Decimal

from pyspark.errors import PySparkRuntimeError

_CANNOT = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID"


def refused(doing: str, said: str) -> PySparkRuntimeError:
    """An operation on state that failed: `said` is what Spark says of it after `Error …: `."""
    return PySparkRuntimeError(f"Error {doing}: {said}")


def no_key(state: str) -> str:
    """State is used where no key is: in `init` or `close`."""
    return f"[INTERNAL_ERROR_TWS] Implicit key not found in state store for stateName={state} SQLSTATE: XX000"


def not_initialized(kind: str, state: str) -> str:
    """State is used that `init` has deleted after it asked for it."""
    return f"{kind.capitalize()} state {state} is not initialized."


def wrong_time_mode(operation: str, mode: str) -> str:
    """There are no timers without a time mode."""
    said = f"Failed to perform stateful processor operation={operation} with invalid timeMode={mode}"
    return f"[{_CANNOT}_TIME_MODE] {said} SQLSTATE: 42802"


def wrong_handle_state(operation: str, state: str) -> str:
    """An operation comes too early or too late."""
    said = f"Failed to perform stateful processor operation={operation} with invalid handle state={state}."
    return f"[{_CANNOT}_HANDLE_STATE] {said} SQLSTATE: 42802"


def defined_twice(name: str) -> str:
    """Two variables of different kinds have one name."""
    said = f"State variable with name {name} has already been defined in the StatefulProcessor."
    return f"[STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED] {said} SQLSTATE: 42802"


def wrong_name(operation: str, name: str) -> str:
    """A variable has a name that cannot be one of the state store's."""
    said = f"Failed to perform column family operation={operation} with invalid name={name}."
    rule = "Column family name cannot be empty or include leading/trailing spaces or use the reserved keyword=default"
    return f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {said} {rule} SQLSTATE: 42802"


def reserved_name(name: str) -> str:
    """A variable has a name as Spark's own have."""
    said = f"Failed to create column family with unsupported starting character and name={name}."
    return f"[STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS] {said} SQLSTATE: 42802"


def ttl_needs_processing_time(name: str, mode: str) -> str:
    """Only the processing time makes state expire."""
    said = f"Cannot use TTL for state={name} in timeMode={mode}, use TimeMode.ProcessingTime() instead."
    return f"[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] {said} SQLSTATE: 42802"


def ttl_not_positive(name: str) -> str:
    """A time to live is negative."""
    said = f"TTL duration must be greater than zero for State store operation=update on state={name}."
    return f"[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] {said} SQLSTATE: 42802"


def empty_list(name: str) -> str:
    """An empty list is to be kept."""
    said = f"Cannot write empty list values to State Store for StateName {name}."
    return (
        f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] Illegal value provided to the State Store {said} SQLSTATE: 42601"
    )


def wrong_length(expected: int, actual: int) -> str:
    """A struct has more or fewer values than its type has fields."""
    said = "Input row doesn't have expected number of values required by the schema."
    numbers = f"{expected} fields are required while {actual} values are provided."
    return f"[STRUCT_ARRAY_LENGTH_MISMATCH] {said} {numbers} SQLSTATE: 2201E"


def decimal_too_long(value: Decimal, rounded: Decimal, precision: int, scale: int) -> str:
    """A decimal has more digits than its type."""
    said = f"The {rounded} rounded half up from {value} cannot be represented as Decimal({precision}, {scale})."
    return f"[NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION]  {said} SQLSTATE: 22003"


def null_in_map_key() -> str:
    """A map in a value has a key that is null."""
    return "[NULL_MAP_KEY] Cannot use null as map key. SQLSTATE: 2200E"


def null_field(index: int, name: str) -> str:
    """A field that may not be null is."""
    return f"The {index}th field '{name}' of input row cannot be null."
