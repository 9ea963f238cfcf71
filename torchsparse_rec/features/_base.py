"""The base classes of columns: name, raw features and configuration; and checks of columns' arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

from ..variable import EmbeddingVariableOption
from ._growing import plain_option

ColumnT = TypeVar("ColumnT", bound="Column")

#: Every kind of column by its class's name.
CLASSES: dict[str, type[Column]] = {}

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False, repr=False)
class Column:
    """
    A column: how one or several raw features are transformed. Immutable, hashable, with a JSON form.

    Example:
        >>> import json
        >>> from torchsparse_rec.features import *
        >>> column = embedding_column(categorical_column_with_identity("user", 100), 8)
        >>> column.name, column.features()
        ('user_embedding', ['user'])
        >>> Column.from_config(json.loads(json.dumps(column.to_config()))) == column
        True
    """

    #: The names of the fields that hold other columns.
    PARENTS: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        CLASSES[cls.__name__] = cls

    @property
    def name(self) -> str:
        """The column's name in results and errors, the same as TensorFlow's."""
        raise TypeError(f"{type(self).__name__} has no name")

    def parents(self) -> list[Column]:
        """Return the columns that this column is made from."""
        found: list[Column] = []
        for field in self.PARENTS:
            value = getattr(self, field)
            found += [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Column)]
        return found

    def features(self) -> list[str]:
        """Return the names of the raw features that the column reads."""
        return [feature for parent in self.parents() for feature in parent.features()]

    def leaves(self) -> Iterator[Column]:
        """Yield the columns at the bottom of this one, which are made from no other column, in order."""
        if not self.parents():
            yield self
        for parent in self.parents():
            yield from parent.leaves()

    def to_config(self) -> dict[str, Any]:
        """
        Return plain data for JSON, in TensorFlow's form; :meth:`from_config` makes an equal column of it.

        Raises:
            ValueError: for a function that has no configuration, such as a lambda as a normalizer.
        """
        config = {field.name: _plain(getattr(self, field.name), self, field.name) for field in fields(self)}
        return {"class_name": type(self).__name__, "config": config}

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Column:
        """Make a column from the result of :meth:`to_config`, or of TensorFlow's ``serialize_feature_column``."""
        return column_from_config(config)

    @classmethod
    def _from_fields(cls: type[ColumnT], values: dict[str, Any]) -> ColumnT:
        """Make a column from the fields of a configuration, whose other columns are already made."""
        known = {field.name for field in fields(cls)}
        for field in fields(cls):
            if field.default is MISSING and field.name not in values:
                raise ValueError(f"{cls.__name__}: a configuration must have the field {field.name!r}, got {values}")
        for name in values:
            if name not in known:
                raise ValueError(f"{cls.__name__}: a configuration must have the fields {sorted(known)}, got {name!r}")
        return cls(**values)

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._values() == cast(Column, other)._values())

    def __hash__(self) -> int:
        # Cached: a vocabulary of a million words is hashed once, not whenever its column is looked up.
        found = self.__dict__.get("_hash")
        if found is None:
            # Without the options of a table that grows, which may hold lists and tensors.
            hashable = [field.name for field in fields(self) if field.hash is not False]
            found = hash((type(self), *(getattr(self, name) for name in hashable)))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached hash: strings have other hashes in other processes.
        return {field: value for field, value in self.__dict__.items() if field != "_hash"}

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({shown})"


class CategoricalColumn(Column):
    """
    A column of ids in ``[0, num_buckets)``: any number of them per example.

    Example:
        >>> from torchsparse_rec.features import *
        >>> column = categorical_column_with_vocabulary_list("color", ["red", "green"], num_oov_buckets=3)
        >>> isinstance(column, CategoricalColumn), column.num_buckets
        (True, 5)
    """

    @property
    def num_buckets(self) -> int:
        """How many ids there are, which is the number of rows of the column's table."""
        raise TypeError(f"{type(self).__name__} has no buckets")


class DenseColumn(Column):
    """
    A column of ``width`` numbers per example.

    Example:
        >>> from torchsparse_rec.features import *
        >>> column = numeric_column("position", shape=2)
        >>> isinstance(column, DenseColumn), column.width
        (True, 2)
    """

    @property
    def width(self) -> int:
        """How many numbers an example has."""
        raise TypeError(f"{type(self).__name__} has no width")


def column_from_config(config: Any) -> Column:
    """
    Make a column from its configuration.

    Args:
        config: ``{"class_name": ..., "config": {...}}``, as of :meth:`Column.to_config` or of TensorFlow's
            ``serialize_feature_column``.

    Raises:
        ValueError: for a class or a field that does not exist, or values that the column's function refuses.

    Example:
        >>> from torchsparse_rec.features import categorical_column_with_identity
        >>> column_from_config(categorical_column_with_identity("user", 943).to_config())
        IdentityCategoricalColumn(key='user', number_buckets=943)
    """
    if isinstance(config, Column):
        return config
    if not isinstance(config, Mapping) or not {"class_name", "config"} <= set(config):
        raise ValueError(f"config must be a dict of class_name and config, got {repr(config):.200}")
    class_name = config["class_name"]
    if not _is_class(class_name):
        known = sorted(filter(_is_class, CLASSES))
        raise ValueError(f"config: class_name must be one of {known}, got {class_name!r}")
    found = CLASSES[class_name]
    if not isinstance(config["config"], Mapping):
        raise ValueError(f"{class_name}: config must be a dict of its fields, got {repr(config['config']):.200}")
    values = {field: _revived(value) for field, value in config["config"].items()}
    return found._from_fields(values)


def _is_class(name: Any) -> bool:
    """Say whether a name belongs to a class of columns with its own fields, not to an abstract class."""
    return isinstance(name, str) and "__dataclass_fields__" in vars(CLASSES.get(name, object))


def _revived(value: Any) -> Any:
    """Return a field's value from plain data: columns made from their configurations, tuples from lists."""
    if isinstance(value, Mapping) and _is_class(value.get("class_name")):
        return column_from_config(value)
    if isinstance(value, (list, tuple)):
        return tuple(_revived(item) for item in value)
    return value


def _plain(value: Any, column: Column, field: str) -> Any:
    """Return a field's value as plain data for JSON."""
    if isinstance(value, Column):
        return value.to_config()
    if isinstance(value, tuple):
        return [_plain(item, column, field) for item in value]
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, EmbeddingVariableOption):
        return plain_option(value)
    if callable(value):
        raise ValueError(
            f"{type(column).__name__} {column.name!r}: {field} must have a to_config() to be written as a "
            f"configuration, got {value!r}"
        )
    return value


# ---- Checks of the functions that make or take columns --------------------------------------------------------------


def checked_columns(function: str, argument: str, columns: Any, kind: type[ColumnT]) -> list[ColumnT]:
    """Return a list of columns after checking their kind; a single column need not be in a list."""
    found: list[Any] = [columns] if isinstance(columns, Column) else list(columns)
    for position, column in enumerate(found):
        if not isinstance(column, kind):
            raise ValueError(
                f"{function}: {argument} must hold a {kind.__name__} in each place, got {column!r} at position "
                f"{position}"
            )
    return found


def check_key(key: Any) -> str:
    """Return a feature's name, or raise ``ValueError`` if it is no string or empty."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"key must be a string that is not empty, got {key!r}")
    return key


def dtype_name(dtype: Any, key: str) -> str:
    """Return the name of torch's, numpy's or TensorFlow's dtype: in ``INTEGERS``, in ``FLOATS`` or ``"string"``."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):
        name = "string" if issubclass(dtype, (str, bytes)) else {int: "int64", float: "float32"}.get(dtype, name)
    if name not in (*INTEGERS, *FLOATS, "string"):
        raise ValueError(f"column {key!r}: dtype must be 'string', an integer or a float, got {dtype!r}")
    return cast(str, name)


def check_string_or_int(dtype: Any, key: str) -> str:
    """Return the name of a categorical column's dtype, or raise ``ValueError`` if it is a float."""
    name = dtype_name(dtype, key)
    if name in FLOATS:
        raise ValueError(f"column {key!r}: dtype must be 'string' or an integer, got {name!r}")
    return name


def check_count(what: str, value: Any, least: int, key: str) -> int:
    """Return an integer, or raise ``ValueError`` unless it is in ``[least, 2 ** 63)``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ValueError(f"column {key!r}: {what} must be an integer of at least {least}, got {value!r}")
    if int(value) >= 2**63:
        raise ValueError(f"column {key!r}: {what} must be an integer below 2 ** 63, got {value!r}")
    return int(value)
