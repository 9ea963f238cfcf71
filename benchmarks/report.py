"""The runner of benchmark rows, and the report on their results as text and JSON."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .rows import Case, Fact, Options, Row, UnavailableError
from .timing import Pair, clock_block, compare


@dataclass(frozen=True)
class Judgement:
    """A target of a row, and what the row reached."""

    what: str
    reached: float
    wanted: float

    def passed(self) -> bool:
        """Say whether the row reached the target."""
        return self.reached >= self.wanted


@dataclass
class Result:
    """A row's measurements, without its data."""

    row: Row
    device: str = "cpu"
    bytes_moved: int | None = None
    samples: int | None = None
    ids: int | None = None
    sizes: str = ""
    peers: list[str] = field(default_factory=list)
    pairs: dict[str, Pair] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    # Our time where no peer could be timed.
    alone_ms: float | None = None
    # Whether the targets apply. They are for the full sizes.
    judged: bool = True
    # The error of a row without figures.
    failed: str | None = None

    def ours_ms(self) -> float:
        """Return the median of our medians, one per peer, in milliseconds."""
        times = [pair.ours_ms for pair in self.pairs.values()]
        return statistics.median(times) if times else float(self.alone_ms or 0.0)

    def gb_per_second(self) -> float | None:
        """Return the bytes that the row must move over our time, in 10^9 bytes per second."""
        return None if self.bytes_moved is None else self.bytes_moved / (self.ours_ms() * 1e-3) / 1e9

    def ids_per_second(self) -> float | None:
        """Return the ids of a call over our time."""
        return None if self.ids is None else self.ids / (self.ours_ms() * 1e-3)

    def target(self, peer: str) -> float | None:
        """Return the least ratio to a peer on this device, or None."""
        return (self.row.cuda.peers if self.device == "cuda" else self.row.targets).get(peer)

    def passed(self, peer: str) -> bool | None:
        """Say whether the ratio to a peer reaches its target; None without a target, or where it is not judged."""
        target = self.target(peer)
        if target is None or peer not in self.pairs or not self.judged:
            return None
        return self.pairs[peer].ratio() >= target

    def fastest_peer(self) -> str | None:
        """Return the name of the peer with the shortest time."""
        return min(self.pairs, key=lambda name: self.pairs[name].ratio(), default=None)

    def judgements(self, copy_gb: float) -> Iterator[Judgement]:
        """Yield the row's targets on a GPU, beside its ratios to single peers, and what it reached."""
        wanted, rate, ids = self.row.cuda, self.gb_per_second(), self.ids_per_second()
        if self.device != "cuda" or not self.judged or self.failed is not None:
            return
        if wanted.copy_share is not None and rate is not None:
            yield Judgement("share of the copy bandwidth", rate / copy_gb, wanted.copy_share)
        fastest = self.fastest_peer()
        if wanted.fastest_peer is not None and fastest is not None:
            yield Judgement(f"ratio to the fastest peer, {fastest}", self.pairs[fastest].ratio(), wanted.fastest_peer)
        if wanted.ids_per_second is not None and ids is not None:
            yield Judgement("10^9 ids a second", ids / 1e9, wanted.ids_per_second / 1e9)


def describe(row: Row, case: Case, options: Options) -> Result:
    """Return a result without figures."""
    result = Result(row, options.device, judged=not options.quick, peers=list(case.peers))
    result.bytes_moved, result.samples, result.ids, result.sizes = (
        case.bytes_moved,
        case.samples,
        case.ids,
        case.sizes,
    )
    return result


def run_row(row: Row, options: Options) -> Result:
    """
    Check a row's result, then time the row beside each peer.

    Each peer has its own window with our side. So a ratio compares calls that ran side by side, and only two tables are
    in memory at a time.

    Raises:
        AssertionError: if the check fails; nothing is timed then.
    """
    case = row.build(options)
    case.check()
    result = describe(row, case, options)
    for name, make in case.peers.items():
        try:
            if case.pair is not None:
                result.pairs[name] = case.pair(name)
                continue
            peer = make()
        except (UnavailableError, torch.OutOfMemoryError) as error:
            result.unavailable[name] = str(error).partition("\n")[0]
            continue
        ours = case.ours()
        result.pairs[name] = compare(ours, peer, options.device, options.quick)
        del peer, ours
        gc.collect()
    if not result.pairs:
        times = clock_block(case.ours(), 20, options.device)[5:]
        result.alone_ms = statistics.median(times)
    result.facts = case.facts()
    return result


def mark(passed: bool | None) -> str:
    """Return one word for whether a target was reached."""
    return {None: "", True: "pass", False: "MISS"}[passed]


def lines(result: Result, copy_gb: float) -> list[str]:
    """Return the lines that are printed for a row."""
    row = result.row
    printed = [f"{row.name}: {row.what}" + (f" ({result.sizes})" if result.sizes else "")]
    if result.failed is not None:
        return [*printed, f"  FAILED: {result.failed}"]
    printed.append(_our_line(result, copy_gb))
    printed += [_peer_line(result, name) for name in result.peers]
    for judgement in result.judgements(copy_gb):
        text = f"  {judgement.what}: {judgement.reached:.2f}, target >= {judgement.wanted:g}"
        printed.append(f"{text}   {mark(judgement.passed())}")
    for fact in result.facts:
        limit = "" if fact.limit is None else f"   target < {fact.limit:g} {fact.unit}   {mark(fact.passed())}"
        printed.append(f"  {fact.name:<26}{fact.value:>10.1f} {fact.unit}{limit}")
    if row.published:
        printed.append(f"  published, not measured here: {row.published}")
    return printed


def _our_line(result: Result, copy_gb: float) -> str:
    ours_ms, rate, ids = result.ours_ms(), result.gb_per_second(), result.ids_per_second()
    text = f"  {'ours':<26}{ours_ms:>10.3f} ms"
    if rate is not None:
        text += f"   {rate:.1f} GB/s, {100 * rate / copy_gb:.0f} % of copy"
    if ids is not None:
        text += f"   {ids / 1e9:.3f} x 10^9 ids/s"
    if result.samples:
        text += f"   {result.samples / ours_ms * 1e3:,.0f} samples/s"
    return text


def _peer_line(result: Result, name: str) -> str:
    if name in result.unavailable:
        return f"  {name:<26}{'':>10}      {result.unavailable[name]}"
    pair = result.pairs[name]
    text = f"  {name:<26}{pair.peer_ms:>10.3f} ms   {pair.ratio():>7.2f} x"
    if result.passed(name) is not None:
        text += f"   target >= {result.target(name):g} x   {mark(result.passed(name))}"
    if result.samples:
        text += f"   {result.samples / pair.peer_ms * 1e3:,.0f} samples/s"
    if pair.ours_plan != pair.peer_plan:
        text += f"   ({pair.peer_plan})"
    return text


def as_json(result: Result, copy_gb: float) -> dict[str, Any]:
    """Return a row's entry of the JSON file."""
    head = {"name": result.row.name, "what": result.row.what, "sizes": result.sizes}
    if result.failed is not None:
        return {**head, "failed": result.failed}
    peers = []
    for name in result.peers:
        entry: dict[str, Any] = {"name": name, "target": result.target(name)}
        if name in result.unavailable:
            entry["unavailable"] = result.unavailable[name]
        else:
            pair = result.pairs[name]
            entry.update(ms=pair.peer_ms, ours_ms=pair.ours_ms, ratio=pair.ratio(), passed=result.passed(name))
            entry.update(plan=str(pair.peer_plan), ours_plan=str(pair.ours_plan))
        peers.append(entry)
    rate = result.gb_per_second()
    return {
        **head,
        "ours_ms": result.ours_ms(),
        "bytes_moved": result.bytes_moved,
        "gb_per_second": rate,
        "share_of_copy": None if rate is None else rate / copy_gb,
        "ids_per_second": result.ids_per_second(),
        "samples": result.samples,
        "peers": peers,
        "targets": [{**target.__dict__, "passed": target.passed()} for target in result.judgements(copy_gb)],
        "facts": [{**fact.__dict__, "passed": fact.passed()} for fact in result.facts],
        "published": result.row.published,
    }


def behind(rows: Iterable[dict[str, Any]]) -> list[tuple[float, str, str]]:
    """Return ratio, row and peer wherever a peer is faster, the slowest of ours first, of entries of the JSON file."""
    pairs = [
        (peer["ratio"], row["name"], peer["name"]) for row in rows for peer in row.get("peers", []) if "ratio" in peer
    ]
    return sorted(pair for pair in pairs if pair[0] < 1)


def run(
    rows: list[Row],
    options: Options,
    copy_gb: float,
    emit: Callable[[str], None],
    keep: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """
    Run rows in order, and print each when it is done. A row that fails does not stop the others.

    Args:
        rows: the rows to run.
        options: the options of all rows.
        copy_gb: the copy bandwidth, in 10^9 bytes per second.
        emit: a function that is called with each line.
        keep: a function that is called after each row with all results so far, to store them.

    Returns:
        The results.
    """
    results: list[Result] = []
    for row in rows:
        try:
            result = run_row(row, options)
        except AssertionError as error:
            result = Result(row, options.device, failed=f"the result differs from the reference: {error}")
        except Exception as error:  # Whatever the error is, it is this row's.
            result = Result(row, options.device, failed=f"{type(error).__name__}: {error}")
        for line in lines(result, copy_gb):
            emit(line)
        results.append(result)
        keep(results)
        gc.collect()
        if options.device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # After an illegal access every CUDA call of this process fails.
                emit(f"the GPU no longer answers, no other row is run: {error}")
                break
    return results
