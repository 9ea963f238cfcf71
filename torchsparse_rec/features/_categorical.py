"""Columns of ids made from one feature: identity, hash buckets, vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..variable import EmbeddingVariableOption
from ._base import CategoricalColumn, check_count, check_key, check_string_or_int
from ._growing import checked_option
from ._plain import make_fields_plain, set_field
from .words import as_list, check_distinct, checked_words, encoded, integer_of, lines_of


class LeafColumn(CategoricalColumn):
    """A categorical column that reads one feature, and has the feature's name."""

    key: str
    #: Whether -1 and the empty string, where the number of values is fixed, mean a missing value.
    drop_missing: bool = True

    @property
    def name(self) -> str:
        """The feature's name."""
        return self.key

    def features(self) -> list[str]:
        """Return the name of the one feature that the column reads."""
        return [self.key]


@dataclass(frozen=True, eq=False, repr=False)
class IdentityCategoricalColumn(LeafColumn):
    """Integers that are ids already: see :func:`categorical_column_with_identity`."""

    key: str
    number_buckets: int
    default_value: int | None = None

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        set_field(self, "number_buckets", check_count("num_buckets", self.number_buckets, 1, self.key))
        if self.default_value is not None:
            default = check_count("default_value", self.default_value, 0, self.key)
            if default >= self.number_buckets:
                raise ValueError(
                    f"column {self.key!r}: default_value must be in [0, {self.number_buckets}), got {default}"
                )

    @property
    def num_buckets(self) -> int:
        """How many ids there are."""
        return self.number_buckets


@dataclass(frozen=True, eq=False, repr=False)
class HashedCategoricalColumn(LeafColumn):
    """Hashes of integers' text or of strings: see :func:`categorical_column_with_hash_bucket`."""

    key: str
    hash_bucket_size: int
    dtype: str = "string"
    drop_missing: bool = True

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        set_field(self, "hash_bucket_size", check_count("hash_bucket_size", self.hash_bucket_size, 1, self.key))
        set_field(self, "dtype", check_string_or_int(self.dtype, self.key))

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return self.hash_bucket_size


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddingCategoricalColumn(LeafColumn):
    """Keys of a table that grows: see :func:`categorical_column_with_embedding`."""

    key: str
    dtype: str = "string"
    ev_option: EmbeddingVariableOption = field(default_factory=EmbeddingVariableOption, hash=False)

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        set_field(self, "dtype", check_string_or_int(self.dtype, self.key))
        option = checked_option(self.ev_option, self.key)
        set_field(self, "ev_option", EmbeddingVariableOption() if option is None else option)

    @property
    def num_buckets(self) -> int:
        """Refuse: a table that grows has no number of rows."""
        raise ValueError(
            f"column {self.key!r}: must have a number of buckets here, got the keys of a table that grows: use "
            "categorical_column_with_hash_bucket, or its embedding_column"
        )


class VocabularyColumn(LeafColumn):
    """The base class of both kinds of columns with a vocabulary."""

    dtype: str
    default_value: int
    num_oov_buckets: int

    def words(self) -> list[bytes] | list[int]:
        """Return the vocabulary in order, strings as bytes."""
        raise TypeError(f"{type(self).__name__} has no words")

    def _check_oov(self) -> None:
        set_field(self, "num_oov_buckets", check_count("num_oov_buckets", self.num_oov_buckets or 0, 0, self.key))
        default = -1 if self.default_value is None else self.default_value
        if isinstance(default, bool) or not hasattr(default, "__index__"):
            raise ValueError(f"column {self.key!r}: default_value must be an integer, got {default!r}")
        set_field(self, "default_value", int(default))
        if self.num_oov_buckets and self.default_value != -1:
            raise ValueError(
                f"column {self.key!r}: num_oov_buckets and default_value must not both be given, got "
                f"{self.num_oov_buckets} and {self.default_value}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class VocabularyListCategoricalColumn(VocabularyColumn):
    """Places in a list: see :func:`categorical_column_with_vocabulary_list`."""

    key: str
    vocabulary_list: tuple[str | int, ...] | None
    dtype: str = None  # type: ignore[assignment]
    default_value: int = -1
    num_oov_buckets: int = 0
    max_tokens: int | None = None
    drop_missing: bool = True

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        words = self.vocabulary_list
        if words is not None:
            words = checked_words(words, self.key)
            set_field(self, "vocabulary_list", words)
            kind = "string" if isinstance(words[0], (str, bytes)) else "int64"
        else:
            kind = "string"
        dtype = check_string_or_int(kind if self.dtype is None else self.dtype, self.key)
        if words is not None and (dtype == "string") != (kind == "string"):
            raise ValueError(f"column {self.key!r}: dtype must be that of vocabulary_list, {kind}, got {dtype}")
        set_field(self, "dtype", dtype)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 1, self.key)
        self._check_oov()

    def words(self) -> list[bytes] | list[int]:
        """Return the vocabulary in order, strings as bytes."""
        return [encoded(x) if isinstance(x, str) else x for x in self._listed()]  # type: ignore[return-value]

    def _listed(self) -> tuple[str | int, ...]:
        if self.vocabulary_list is None:
            raise ValueError(
                f"column {self.key!r}: vocabulary_list must be given, or found by adapt(), before it is used"
            )
        return self.vocabulary_list

    @property
    def num_buckets(self) -> int:
        """The size of the vocabulary plus ``num_oov_buckets``."""
        return len(self._listed()) + self.num_oov_buckets

    @property
    def needs_adapt(self) -> bool:
        """Whether ``adapt()`` must still find the vocabulary."""
        return self.vocabulary_list is None


@dataclass(frozen=True, eq=False, repr=False)
class VocabularyFileCategoricalColumn(VocabularyColumn):
    """Lines of a file: see :func:`categorical_column_with_vocabulary_file`."""

    key: str
    vocabulary_file: str | Path
    vocabulary_size: int | None = None
    num_oov_buckets: int | None = 0  # type: ignore[assignment]
    dtype: str = "string"
    default_value: int | None = -1  # type: ignore[assignment]
    file_format: str | None = None

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        if not self.vocabulary_file:
            raise ValueError(f"column {self.key!r}: vocabulary_file must be given, got {self.vocabulary_file!r}")
        set_field(self, "vocabulary_file", str(self.vocabulary_file))
        if self.file_format is not None:
            raise ValueError(
                f"column {self.key!r}: file_format must be None (a text file, one word in each line), got "
                f"{self.file_format!r}"
            )
        set_field(self, "dtype", check_string_or_int(self.dtype, self.key))
        self._check_oov()
        if self.vocabulary_size is None:
            size = len(self._lines())
            if size == 0:
                raise ValueError(
                    f"column {self.key!r}: vocabulary_file must hold a word, got none in {self.vocabulary_file}"
                )
            set_field(self, "vocabulary_size", size)
        check_count("vocabulary_size", self.vocabulary_size, 1, self.key)

    def words(self) -> list[bytes] | list[int]:
        """Return the first ``vocabulary_size`` lines, strings as bytes."""
        lines = self._lines()
        assert self.vocabulary_size is not None
        if len(lines) < self.vocabulary_size:
            raise ValueError(
                f"column {self.key!r}: vocabulary_file must have {self.vocabulary_size} lines (vocabulary_size), got "
                f"{len(lines)} in {self.vocabulary_file}"
            )
        lines = lines[: self.vocabulary_size]
        if b"" in lines:
            raise ValueError(
                f"column {self.key!r}: vocabulary_file {self.vocabulary_file} must have no empty line, got one: line "
                f"{lines.index(b'') + 1}"
            )
        words = lines if self.dtype == "string" else [self._integer(x, n) for n, x in enumerate(lines)]
        check_distinct(words, f"column {self.key!r}: vocabulary_file {self.vocabulary_file}")
        return words  # type: ignore[return-value]

    def _lines(self) -> list[bytes]:
        try:
            return lines_of(self.vocabulary_file)
        except OSError as error:
            raise ValueError(
                f"column {self.key!r}: vocabulary_file must be a file that can be read, got {self.vocabulary_file}: "
                f"{error}"
            ) from error

    def _integer(self, line: bytes, position: int) -> int:
        try:
            return integer_of(line)
        except ValueError:
            raise ValueError(
                f"column {self.key!r}: vocabulary_file {self.vocabulary_file} must hold integers of 64 bits, got "
                f"{line!r} in line {position + 1}"
            ) from None

    @property
    def num_buckets(self) -> int:
        """The size of the vocabulary plus ``num_oov_buckets``."""
        assert self.vocabulary_size is not None and self.num_oov_buckets is not None
        return self.vocabulary_size + self.num_oov_buckets


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityCategoricalColumn:
    """
    Make a column of integers that are ids already, in ``[0, num_buckets)``.

    Negative ids are left out; larger ids make the lookup raise an ``IndexError`` that names them.

    Args:
        key: the feature.
        num_buckets: the number of ids.
        default_value: the id that replaces ids outside ``[0, num_buckets)``. Default: none.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.categorical_column_with_identity``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_identity
        >>> FeatureTransform([categorical_column_with_identity("user", 10)])({"user": [3, -1, 7]}).sparse
        KeyedJaggedTensor({'user': [[3], [], [7]]})
    """
    return IdentityCategoricalColumn(key, num_buckets, default_value)


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string", *, drop_missing: bool = True
) -> HashedCategoricalColumn:
    """
    Make a column of ids that are hashes of strings' bytes or of integers' decimal text.

    Args:
        key: the feature.
        hash_bucket_size: the number of buckets.
        dtype: the dtype of the feature: ``"string"`` (default), or an integer dtype.
        drop_missing: whether ``-1`` and ``""`` mean a missing value, as in TensorFlow, where the number of values per
            example is fixed (default). False: they are hashed, as in Keras.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.categorical_column_with_hash_bucket``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_hash_bucket
        >>> color = categorical_column_with_hash_bucket("color", 1000)
        >>> FeatureTransform([color])({"color": ["green", "", "red"]}).sparse
        KeyedJaggedTensor({'color': [[704], [], [910]]})
    """
    return HashedCategoricalColumn(key, hash_bucket_size, dtype, drop_missing)


def categorical_column_with_embedding(
    key: str, dtype: Any = "string", partition_num: None = None, ev_option: EmbeddingVariableOption | None = None
) -> EmbeddingCategoricalColumn:
    """
    Make a column of keys of any range, whose table grows: an :class:`EmbeddingVariable`.

    Integers are the keys themselves. The key of a string is its hash of 63 bits, that of :func:`to_hash_bucket_fast`
    with ``2 ** 63 - 1`` buckets. As in other columns, -1 and the empty string are missing where the number of values is
    fixed. Its table comes from :func:`embedding_column` or from ``linear_columns``; no sequence can have one.

    Args:
        key: the feature.
        dtype: the dtype of the feature: ``"string"`` (default), or an integer dtype.
        partition_num: None. :func:`torchsparse_rec.distributed.shard` splits tables over ranks.
        ev_option: the filters, evictions and tiers of the table. Default: none of them.

    Raises:
        ValueError: a key that is empty, a dtype of floats, a ``partition_num``, other options.

    Source: DeepRec's ``categorical_column_with_embedding``.

    Example:
        >>> from torchsparse_rec.features import *
        >>> item = categorical_column_with_embedding("item", "int64")
        >>> transform = FeatureTransform([embedding_column(item, 8)])
        >>> transform({"item": [10**12, -1, 7]}).sparse
        KeyedJaggedTensor({'item': [[1000000000000], [], [7]]})
        >>> transform.embedding_bag_configs()[0].ev_option.evictions
        ()
    """
    if partition_num is not None:
        raise ValueError(
            f"column {key!r}: partition_num must be None, got {partition_num!r}: distributed.shard splits tables"
        )
    return EmbeddingCategoricalColumn(key, dtype, EmbeddingVariableOption() if ev_option is None else ev_option)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int] | None = None,
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
    *,
    max_tokens: int | None = None,
    drop_missing: bool = True,
) -> VocabularyListCategoricalColumn:
    """
    Make a column of ids that are the places of strings or integers in a list.

    A value that is not in the list gets ``default_value``, or one of ``num_oov_buckets`` further ids by its hash.
    Negative ids are left out.

    Args:
        key: the feature.
        vocabulary_list: distinct strings or integers. None: ``adapt()`` finds them, the most frequent first.
        dtype: ``"string"`` or an integer dtype. Default: the list's; without a list ``"string"``.
        default_value: the id of values that are not in the list. Default -1: none.
        num_oov_buckets: the number of ids for values that are not in the list, instead of a default. Default 0.
        max_tokens: the largest number of words that ``adapt()`` finds. Default: all.
        drop_missing: whether ``-1`` and ``""`` mean a missing value, as in TensorFlow, where the number of values per
            example is fixed (default). False: they are values like others, as in Keras.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.categorical_column_with_vocabulary_list``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_vocabulary_list
        >>> color = categorical_column_with_vocabulary_list("color", ["red", "green"], num_oov_buckets=2)
        >>> FeatureTransform([color])({"color": ["green", "blue", "red"]}).sparse
        KeyedJaggedTensor({'color': [[1], [3], [0]]})
    """
    words = None if vocabulary_list is None else tuple(as_list(vocabulary_list))
    return VocabularyListCategoricalColumn(key, words, dtype, default_value, num_oov_buckets, max_tokens, drop_missing)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | Path,
    vocabulary_size: int | None = None,
    dtype: Any = "string",
    default_value: int | None = None,
    num_oov_buckets: int | None = None,
    file_format: str | None = None,
) -> VocabularyFileCategoricalColumn:
    """
    Make a column of ids that are the numbers of the lines of a file, from 0 on, that hold strings or integers.

    Args:
        key: the feature.
        vocabulary_file: a text file, one word in each line.
        vocabulary_size: the number of lines, from the first on, that are words. Default: all.
        dtype: ``"string"`` (default) or an integer dtype.
        default_value: the argument of :func:`categorical_column_with_vocabulary_list`.
        num_oov_buckets: the argument of :func:`categorical_column_with_vocabulary_list`.
        file_format: None. TensorFlow's files of gzipped records are not read.

    Raises:
        ValueError: for arguments that TensorFlow refuses too; a file that cannot be read; a repeated word.

    Source: ``tf.feature_column.categorical_column_with_vocabulary_file``.

    Example:
        >>> import tempfile
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_vocabulary_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "colors").write_text(chr(10).join(["red", "green"]))
        ...     transform = FeatureTransform([categorical_column_with_vocabulary_file("color", Path(folder, "colors"))])
        >>> transform({"color": ["green", "blue"]}).sparse
        KeyedJaggedTensor({'color': [[1], []]})
    """
    return VocabularyFileCategoricalColumn(
        key,
        vocabulary_file,
        vocabulary_size,
        num_oov_buckets,
        dtype,
        default_value,
        file_format,  # type: ignore[arg-type]
    )
