"""Errors of Spark's own state handle, with its texts: Spark raises one class, whose text includes the error class."""

from __future__ import annotations

from decimal import Decimal

from pyspark.errors import PySparkRuntimeError

_CANNOT = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID"


def refused(doing: str, text: str) -> PySparkRuntimeError:
    """Create the error of a failed operation on state; `text` is Spark's text after `Error …: `."""
    return PySparkRuntimeError(f"Error {doing}: {text}")


def no_key(state: str) -> str:
    """Text for state that is used without a current key: in `init` or `close`."""
    return f"[INTERNAL_ERROR_TWS] Implicit key not found in state store for stateName={state} SQLSTATE: XX000"


def not_initialized(kind: str, state: str) -> str:
    """Text for state that `init` has deleted after declaring it."""
    return f"{kind.capitalize()} state {state} is not initialized."


def wrong_time_mode(operation: str, mode: str) -> str:
    """Text for timers without a time mode."""
    message = f"Failed to perform stateful processor operation={operation} with invalid timeMode={mode}"
    return f"[{_CANNOT}_TIME_MODE] {message} SQLSTATE: 42802"


def wrong_handle_state(operation: str, state: str) -> str:
    """Text for an operation that comes too early or too late."""
    message = f"Failed to perform stateful processor operation={operation} with invalid handle state={state}."
    return f"[{_CANNOT}_HANDLE_STATE] {message} SQLSTATE: 42802"


def defined_twice(name: str) -> str:
    """Text for two variables of different kinds with one name."""
    message = f"State variable with name {name} has already been defined in the StatefulProcessor."
    return f"[STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED] {message} SQLSTATE: 42802"


def wrong_name(operation: str, name: str) -> str:
    """Text for a variable with a name that the state store does not allow."""
    message = f"Failed to perform column family operation={operation} with invalid name={name}."
    rule = "Column family name cannot be empty or include leading/trailing spaces or use the reserved keyword=default"
    return f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {message} {rule} SQLSTATE: 42802"


def reserved_name(name: str) -> str:
    """Text for a variable with a name that is reserved for Spark."""
    message = f"Failed to create column family with unsupported starting character and name={name}."
    return f"[STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS] {message} SQLSTATE: 42802"


def ttl_needs_processing_time(name: str, mode: str) -> str:
    """Text for a time to live without processing time."""
    message = f"Cannot use TTL for state={name} in timeMode={mode}, use TimeMode.ProcessingTime() instead."
    return f"[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] {message} SQLSTATE: 42802"


def ttl_not_positive(name: str) -> str:
    """Text for a negative time to live."""
    message = f"TTL duration must be greater than zero for State store operation=update on state={name}."
    return f"[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] {message} SQLSTATE: 42802"


def empty_list(name: str) -> str:
    """Text for an empty list."""
    text = f"Cannot write empty list values to State Store for StateName {name}."
    return (
        f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] Illegal value provided to the State Store {text} SQLSTATE: 42601"
    )


def wrong_length(expected: int, actual: int) -> str:
    """Text for a struct with more or fewer values than fields."""
    message = "Input row doesn't have expected number of values required by the schema."
    numbers = f"{expected} fields are required while {actual} values are provided."
    return f"[STRUCT_ARRAY_LENGTH_MISMATCH] {message} {numbers} SQLSTATE: 2201E"


def decimal_too_long(value: Decimal, rounded: Decimal, precision: int, scale: int) -> str:
    """Text for a decimal with more digits than its type."""
    message = f"The {rounded} rounded half up from {value} cannot be represented as Decimal({precision}, {scale})."
    return f"[NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION]  {message} SQLSTATE: 22003"


def null_in_map_key() -> str:
    """Text for a null key in a map inside a value."""
    return "[NULL_MAP_KEY] Cannot use null as map key. SQLSTATE: 2200E"


def null_field(index: int, name: str) -> str:
    """Text for null in a non-nullable field."""
    return f"The {index}th field '{name}' of input row cannot be null."
