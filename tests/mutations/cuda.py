"""
The faults that ``make mutate`` plants in the CUDA kernels, one at a time; each must turn the emulated tests red.

Every ``.cu`` file has at least two kinds of faults. A daily test checks that each text is still in its file: whoever
changes a line changes its entry. ``tests`` of an entry is pytest's -k, among the kernels' test files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from .mutation import ROOT, Mutation, Table

KINDS = ("sign", "bound", "step")  # a changed sign, order or choice; a moved bound; a dropped step

FAULTS = {
    "bags.cu": [
        ("step", "(given[b]) : entries", "(given[b]) : entries - 1", "embedding_bag"),
        ("bound", "offset < given[b - 1]", "offset <= given[b - 1]", "embedding_bag"),
        ("bound", "b == all && offset", "b > all && offset", "recorded"),
        ("sign", "bags[i] = bag_of(i)", "bags[i] = -bag_of(i)", "weights_backward"),
    ],
    "embedding.cu": [
        ("bound", "bad >= rows", "bad > rows", "recorded"),
        ("step", "      any_bad = any_bad || !in_range;\n", "", "recorded"),
        ("bound", "tile.column < units)", "tile.column <= units)", "embedding and not bag"),
        ("step", "+ kRowsInFlight - 1) / kRows", ") / kRows", "lookups"),
    ],
    "quantized.cu": [
        ("bound", "index >= 0 && index < rows;", "index >= 0 && index <= rows;", "quantized"),
        ("sign", ": c % 2 * 4;", ": (c + 1) % 2 * 4;", "quantized"),
        ("step", "bias = read_at<float, (width > 1)>(end + 4);", "bias = 0;", "quantized"),
    ],
    "table_shards.cuh": [
        ("bound", "lanes_log2) / 2; step", "lanes_log2) / 4; step", "weights_backward"),
        ("bound", "shards, r + 1)", "shards, r)", "shards"),
    ],
    "embedding_backward.cu": [
        ("step", "A(0) : weight / divisor", "A(0) : weight", "gradients_of_bags"),
        ("sign", "Divisor::kCount : ", "Divisor::kOne : ", "dense_backward"),
    ],
    "embedding_collection.cu": [
        ("sign", "if (per_sample_weights) {", "if (!per_sample_weights) {", "collection"),
        ("step", "      in.weights = call.data<T>(*per_sample_weights);\n", "", "single_ones"),
    ],
    "embedding_collection.cuh": [
        ("bound", "std::min(of_key[key], ", "std::max(of_key[key], ", "bad_values"),
        ("bound", "return most * items;", "return items;", "gradients_equal"),
    ],
    "embedding_collection_forward.cuh": [("sign", "mode) != of_", "mode) == of_", "single_ones")],
    "embedding_collection_backward.cu": [
        ("sign", "first_rows[w];\n  }\n}", "0;\n  }\n}", "gradients_equal"),
        ("bound", "bounds, tables, g + 1)", "bounds, tables, g)", "gradients_equal"),
    ],
    "embedding_collection_groups.cuh": [
        ("bound", "*runs.count - 1, row)", "*runs.count - 1, row + 1)", "gradients_equal"),
        ("sign", ".positions[j]) this", ".positions[0]) this", "gradients_equal"),
    ],
    "embedding_collection_groups.cu": [
        ("bound", "lookup_count, entry + 1) - 1", "lookup_count, entry) - 1", "gradients_eq"),
        ("step", "    positions.move(j, entry);\n", "", "gradients_equal"),
        ("sign", "rows > kLargestKey ||", "rows < 0 ||", "beyond_32_bits"),
        ("step", "A(0) : weight / divisor;", "A(0) : weight;", "gradients_equal"),
        ("bound", "index == lookup.rows && lookup.padding_idx == lookup.rows", "index == lookup.rows", "collection"),
    ],
    "embedding_collection_current.cu": [
        ("sign", "index == p.padding_idx) continue", "false) continue", "as_of_now"),
        ("step", "rounded_weight(optimizer, now[c])", "now[c]", "as_of_now"),
    ],
    "embedding_collection_update.cu": [
        ("bound", "mine.entries > kPiece", "mine.entries > 2 * kPiece", "updates"),
        ("sign", " - in.first_rows[found.w]", "", "updates"),
        (
            "sign",
            "in.slots[group_of_block(in, mine.w, block)] * in.stride",
            "in.slots[block] * in.stride",
            "collection",
        ),
    ],
    "uploads.cu": [
        ("step", " || sent.words != words", "", "sent_again"),
        ("sign", " && !is_capturing(call.stream())", "", "captured"),
        ("step", "to + begin);", "to);", "many_shards"),
    ],
    "pool_plan.cu": [
        ("step", "    if (plan.slots != nullptr) plan.slots[number] = slot;\n", "", "updates"),
        ("bound", "parts.count, bag + 1) - 1", "parts.count, bag) - 1", "single_ones"),
        ("bound", "begin + k * kPiece", "begin + k * (kPiece - 1)", "pooled_bags"),
        ("sign", "end - begin <= kEnt", "end - begin >= kEnt", "pooled_bags"),
        ("step", "    relaxed_store(&plan.found[3], 1ull);\n", "", "offsets_without_sense"),
        ("step", "first_total + k, part}", "first_total, part}", "pooled or bag or segment"),
    ],
    "embedding_collection_weights_backward.cu": [
        ("sign", "gradient : result + gradient", "gradient : result - gradient", "of_weights"),
        ("bound", "w.keys, bag + 1)", "w.keys, bag)", "of_weights"),
        ("step", "rounded_weight(optimizer, now[c])", "A(0)", "as_of_now"),
    ],
    "pool_parts_kernels.cuh": [
        ("bound", "next = bag + 1;", "next = bag + 2;", "single_ones"),
        ("sign", "shares[other * lanes", "shares[lanes", "single_ones"),
    ],
    "pool_parts.cuh": [("bound", "[begin + mine] <= x", "[begin + mine] < x", "many_tables")],
    "embedding_ids.cu": [
        ("sign", "> acc_t<W>(0))) return", "< acc_t<W>(0))) return", "pruned"),
        ("bound", "while (to < end &&", "while (to + 1 < end &&", "pruned"),
        ("bound", "row < sizes[shard]", "row <= sizes[shard]", "shard"),
        ("step", "      kept = false;\n", "", "bad_entries"),
        ("bound", "keep_padding && id == total;", "keep_padding && id >= total;", "shard or lookup or pruned"),
    ],
    "embedding_shards.cu": [
        ("sign", "norm < max_norm ? g[c]", "norm > max_norm ? g[c]", "clip_rows"),
        ("bound", "b <= entries; b", "b < entries; b", "shards"),
    ],
    "pool.cuh": [("sign", "(with_row - with_output", "(with_row + with_output", "weights_backward")],
    "embedding_weights_backward.cu": [
        ("step", "products.with_row = team_sum(tiling, products.with_row);", "", "weights_backward"),
        ("bound", "index != w.padding_idx && bag", "bag", "weights_backward"),
    ],
    "errors.h": [
        (
            "step",
            "= atomicCAS(&record->first, first, static_cast<unsigned long long>(kNoError));",
            "= first;",
            "recorded",
        ),
        ("sign", "if (seen == first) {", "if (atomicExch(&record->first, ~0ull), true) {", "lost"),
    ],
    "errors.cu": [
        ("bound", "(uint64_t{1} << kPositionBits) - 1", "(uint64_t{1} << 2) - 1", "recorded"),
        ("step", " - static_cast<uint64_t>(e.begin);", ";", "own_table"),
        ("sign", 'must not decrease, got ", e.bound', 'must not decrease, got ", e.value', "recorded"),
        (
            "sign",
            '"[", position, ", ", e.column, "]")',
            '"[", e.column, ", ", position, "]")',
            "recorded or error or name",
        ),
    ],
    "hash.cu": [
        ("sign", "below_zero ? 0 - word : word", "below_zero ? word : word", "to_hash_bucket_strong"),
        ("bound", "n >= 4) return farm", "n > 4) return farm", "to_hash_bucket"),
        ("sign", "negative ? 0 - bits : bits", "negative ? bits : bits", "to_hash_bucket"),
        ("step", "    v -= divisor;\n    ++quotient;\n", "", "hash"),
    ],
    "hash_cross.cu": [
        ("bound", "rows + 1, i + 1) - 1", "rows + 1, i) - 1", "cross_hashed"),
        ("sign", "number -= place * inner", "number += place * inner", "cross_hashed"),
        ("step", "counts[row] = valid ? count : 0", "counts[row] = count", "cross"),
        ("bound", "columns.width(c, row), most + 1)", "columns.width(c, row), most)", "cross"),
    ],
    "hash_strings.cu": [
        ("bound", "end <= size;", "end < size;", "string_to_hash"),
        ("step", "(offset_ + n) % 4}; }", "offset_}; }", "string_to_hash"),
    ],
    "pool_extremes.cuh": [
        ("sign", "offered > value[c]", "offered < value[c]", "pooled_bags and max"),
        ("sign", "entry.negated ? -x : x", "x", "pooled_bags and max"),
        ("bound", "later.winner[c] >= 0", "later.winner[c] > 0", "pooled_bags and max"),
        ("step", "      winner[c] = j;\n", "", "pooled_bags and max"),
    ],
    "pool_extremes.cu": [
        ("sign", "winners[c] != p", "winners[c] == p", "gradients_of_bags and max"),
        ("step", "    view.positions = positions;\n", "", "gradients_of_bags and max"),
    ],
    "pool_rows.cu": [
        ("sign", "!= nullptr || pooling.scales !=", "== nullptr || pooling.scales !=", "pooled"),
        ("step", "  if (pooling.weights != nullptr) return pool_weighted_rows(call, pooling);\n", "", "pooled"),
    ],
    "pool_scaled.cu": [
        ("sign", "c, entry.scale *", "c, -entry.scale *", "gradients_of_bags"),
        ("sign", "!= nullptr ? p.coefficients", "== nullptr ? p.coefficients", "gradients_of_bags"),
        ("step", "    this->count_entry();\n", "", "gradients_of_bags"),
    ],
    "pool_weighted.cuh": [
        ("sign", "sums.add(c, scale *", "sums.add(c, -scale *", "pooled"),
        ("sign", "sums.add(1, weight * weight)", "sums.add(1, weight)", "pooled and sqrtn"),
        ("step", "    weights.merge(later.weights);\n", "", "pooled and mean"),
    ],
    "pool_weighted.cu": [
        ("sign", "weight * entry.coefficient", "weight", "embedding_bag_shards"),
        ("bound", "(pooling.bags);", "(pooling.bags - 1);", "gradients_of"),
    ],
    "primitives.cu": [
        ("sign", "cuda::std::plus<int64_t>", "cuda::std::minus<int64_t>", "unique"),
        ("bound", "int64_t{0}, n + 1", "int64_t{0}, n", "unique"),
        ("bound", "n, 0, bits", "n, 0, bits - 1", "segment and grad"),
        ("step", "{keys.Current(),", "{from.keys,", "segment and grad"),
        ("sign", "!= keys[j - 1]", "== keys[j - 1]", "grad_v2"),
    ],
    "row_groups.cu": [
        ("bound", "write_offsets(keys, entries, rows, ", "write_offsets(keys, entries, rows - 1, ", "reduce_grad"),
        ("step", 'have entries") - 1', 'have entries")', "grad_v2"),
        ("sign", "keys[present.offsets[r]]", "keys[present.offsets[0]]", "grad_v2"),
    ],
    "segment_ids.cuh": [
        ("bound", "id < segment_ids[i - 1]", "id <= segment_ids[i - 1]", "segment"),
        ("bound", "entries, segments, offsets);", "entries, segments - 1, offsets);", "segment"),
        ("bound", "begin_lanes >> (lane + 1)", "begin_lanes >> (lane + 2)", "gradients_of_segments"),
    ],
    "row_optimizer.cu": [
        ("bound", "first_block <= block", "first_block < block", "many_tables"),
        ("sign", "if (row <= before)", "if (row < before)", "skipped_and"),
        ("bound", "row >= rows) {", "row > rows) {", "own_table"),
        ("step", "store(column, zeros);", ";", "read_as_zeros"),
        ("sign", "result.now = arguments.now", "result.now = arguments.step", "many_tables"),
        ("step", "work.rows != nullptr && skips", "skips", "zeros"),
        ("step", "(skips || call.has_rule_of_zeros)", "skips", "seen"),
        ("step", "  append_map(history, at, leaf);\n", "", "row_optimizer_advance"),
    ],
    "row_optimizer.cuh": [
        ("step", "      if (is_zero && skips) return;\n", "", "collection"),
        ("step", "if (is_zero) sums[0] = sums[1] = 0;", "", "seen"),
        ("step", "step_columns, is_zero);", "step_columns);", "seen"),
        ("step", "  team.wait();  // until all lanes have read\n    A", "  A", "many_tables"),
        ("bound", "if (column + c < table_.columns) rule", "rule", "beyond_the_last"),
        ("sign", "table_.columns <= tile", "table_.columns >= tile", "wider_than_a_team"),
        ("step", "return adam().second(own_);", "return own_;", "partial_rowwise"),
        ("step", "sums[c] = term.d * sums[c] + term", "sums[c] = term", "sums_in_parts"),
        ("step", "      if (in_parts_) {", "      if (false) {", "sums_in_parts"),
        ("bound", "max(int64_t{0}, static_cast<int64_t>(", "((", "row_optimizer"),
    ],
    "row_optimizer_columns.cuh": [
        ("sign", "return !team.any(found);", "return team.any(found);", "zeros"),
        ("bound", "if (c < count) to[c] = f(c);", "to[c] = f(c);", "tables_of_all"),
        ("bound", "step = lanes() / 2", "step = lanes() / 4", "wider_than_a_team"),
        ("sign", "return sign * factor", "return factor", "direction"),
    ],
    "row_update.cu": [
        ("bound", "j + k < entries", "j + k + 1 < entries", "row_update and by_hand"),
        ("bound", "key >= rows || tile", "key > rows || tile", "skipped_by"),
        ("sign", "key(tile.row - 1) != key", "key(tile.row - 1) == key", "row_update"),
        ("step", "    store_vector<T, width>(weight, row.weight);\n", "", "row_update and by_hand"),
        ("bound", "aligned && stride % width == 0", "aligned", "strides_of_their_own"),
        ("step", "store_vector<T, width>(weight, row.weight);", "", "row_update and by_hand"),
        (
            "sign",
            "store_vector<T, width>(tables.state[s] + key * tables.state_stride[s]",
            "store_vector<T, width>(tables.state[s] + key * tables.weight_stride",
            "row_update",
        ),
    ],
    "sparse_segment.cu": [
        ("sign", "A(1) / (reduction", "A(-1) / (reduction", "reduce_grad"),
        ("step", "n : sqrt(n)", "n : n", "reduce_grad"),
        ("bound", "id >= 0 && id < segments) return", "id >= 0 && id <= segments) return", "segment"),
    ],
    "sparse_tensor.cu": [
        ("bound", "id < 0 || id >= rows", "id < 0 || id > rows", "name_the_argument"),
        ("bound", "rows + 1, i + 1) - 1", "rows + 1, i) - 1", "offsets_to_row_ids"),
        ("sign", "offset < offsets[r - 1]", "offset > offsets[r - 1]", "offsets_to_row_ids"),
        ("step", "  write_offsets(row_ids, items, rows, offsets);\n", "", "row_ids_to_offsets"),
    ],
    "sparse_tensor_order.cu": [
        ("sign", " ^ kSign;", ";", "reorder"),
        ("step", " std::swap(from, spare);", ";", "reorder"),
        ("bound", "if (element > before)", "if (element >= before)", "name_the_argument"),
        ("bound", "static_cast<P>(i + 1)", "static_cast<P>(i)", "sparse_to_dense"),
    ],
    "sparse_tensor_rows.cu": [
        ("bound", "if (row < before) atomicMax", "if (row < before - 1) atomicMax", "fill"),
        ("bound", "while (num_rows >> bits != 0)", "while (num_rows >> bits > 1)", "fill"),
        ("bound", "half = kThreads / 2", "half = kThreads / 4", "fill_empty_rows_grad"),
        (
            "step",
            "  sums[threadIdx.x] = value;\n  __syncthreads();",
            "  sums[threadIdx.x] = value;",
            "fill_empty_rows_grad",
        ),
        ("sign", "= d == 0 ? row : 0;", "= row;", "fill"),
    ],
    "segment_entries.cu": [
        ("bound", "if (id >= segments) errors", "if (id > segments) errors", "segment"),
        ("sign", "sources == nullptr ? e", "sources != nullptr ? e", "segment"),
    ],
    "segment.cu": [
        ("sign", "x > total || x != x", "x < total || x != x", "segment"),
        ("sign", "extreme(reduction) ? o", "divided(reduction) ? o", "segment"),
        ("step", "    if (later.count == 0) return;\n", "", "segment"),
        ("bound", "count += later.count", "count += 0", "segment"),
        (
            "step",
            "count == 0 ? later.value[c] : operation.fold(value[c], later.value[c])",
            "operation.fold(value[c], later.value[c])",
            "segment",
        ),
    ],
    "segment_backward.cu": [
        ("sign", "zeros == 1 ? share", "zeros == 2 ? share", "segment"),
        ("step", "      this->count[c] += times;\n", "", "segment"),
        ("bound", "segment >= 0 &&", "segment > 0 &&", "segment"),
        ("sign", "n : sqrt(n)", "sqrt(n) : n", "segment"),
        ("step", "      this->count[c] += later.count[c];\n", "", "segment"),
    ],
    "unique.cuh": [
        ("sign", "if (found > entry) found = atomicMin", "if (found < entry) found = atomicMin", "unique"),
        ("bound", "slot = slot + 1 == capacity ? 0 : slot + 1", "slot = slot + 1", "unique"),
    ],
    "unique.cu": [
        ("bound", "number[k] >= kCounters", "number[k] > kCounters", "with_counts"),
        (
            "step",
            "  __syncthreads();\n  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
            "  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
            "with_counts",
        ),
        ("step", "counters[c] = 0;\n  __syncthreads();", "counters[c] = 0;", "with_counts"),
        ("step", "return u == units;", "return true;", "rows_made_to_collide"),
        ("sign", "hashes[position] != value.hash", "hashes[position] == value.hash", "unique_rows"),
    ],
    "table.cuh": [
        ("sign", "kPassedWord] == 0) break", "kPassedWord] != 0) break", "table and collide"),
        ("step", "      ++passes(place.region + passed);\n", "", "table and programs"),
        ("bound", "more = here[kAhead - 1];", "more = false;", "table and batches"),
        ("sign", "zeros >> 7) * 0x10204080u", "zeros >> 7) * 0x10204040u", "table and batches"),
        ("bound", "seeded[2 * which + 1])", "seeded[2 * which])", "with_a_seed"),
    ],
    "table.cu": [
        ("sign", ") != claim_of(i)", ") == claim_of(i)", "table and batches"),
        ("step", "    relaxed_store(&entry[1], kFreeEntry);\n", "", "table and programs"),
        ("bound", "(regions >> bits) != 0", "(regions >> bits) > 1", "table and batches"),
        ("step", "  write(kSecondFactor, factors.second);\n", "", "with_a_seed"),
    ],
    "table_insert.cu": [
        ("step", "if (found > position) atomicMin(&slots[slot], position);", "", "table and batches"),
        ("sign", "ids[found] != key || ", "", "table and batches"),
        ("sign", " || !part.has(found)", "", "table and one_pass"),
        ("bound", "parts[middle].end <= i", "parts[middle].end < i", "table and one_pass"),
        ("step", "- before[part.begin]; }", "- before[part.begin] / 2; }", "table and one_pass"),
        ("step", "    relaxed_store(&in.refused[p], 1);\n", "", "table and told"),
        ("bound", "value <= most", "value <= most + 1", "table and told"),
        ("bound", "slot + 1 == capacity ?", "slot == capacity ?", "table and collide"),
        ("bound", "k < reusable())", "k <= reusable())", "table and programs"),
        ("step", "      part.table.erase(key, in.taken[i]);\n", "", "table and run_out"),
        ("sign", "missing.first_of(i) == i)", "missing.first_of(i) != i)", "table and batches"),
        ("sign", "(was_there || in.frequencies == nullptr)", "true", "table and programs"),
        (
            "bound",
            "      atomicMin(&halves[0], kMost);  // whoever has gone beyond the most goes back to it\n",
            "",
            "table and frequencies",
        ),
        ("sign", "part.counters[kUsed] += given - reused;", "part.counters[kUsed] += given;", "table"),
    ],
    "table_rows.cu": [
        ("bound", "row >= table_rows && tile", "row > table_rows && tile", "recorded"),
        ("sign", "!= pairs.keys[tile.row];", "== pairs.keys[tile.row];", "table and assignment"),
        ("step", "k == c ? value : result.at[k]", "value", "table and lookup"),
        ("bound", "alignment % 16 == 0", "alignment % 4 == 0", "table and assignment"),
        (
            "sign",
            "tile.row + 1 == entries || pairs.keys[tile.row + 1] != pairs.keys[tile.row]",
            "tile.row == 0 || pairs.keys[tile.row - 1] != pairs.keys[tile.row]",
            "table",
        ),
    ],
    "scores.cu": [
        ("sign", "return x > y ? x : y;", "return x < y ? x : y;", "scores_"),
        ("step", "c == place ? share + own_factor[n] : share", "share", "scores_"),
        ("bound", "warp < blockDim.x / kWarp", "warp + 1 < blockDim.x / kWarp", "scores_"),
        ("bound", "value >= rows);", "value > rows);", "targets"),
        ("bound", "if (place >= kThreads) return false;", "if (place >= kThreads) return true;", "top_k"),
        (
            "sign",
            "+= is_better(values[i], rows[i], values[mine], rows[mine])",
            "+= values[i] > values[mine]",
            "top_k",
        ),
        ("sign", "end = k; end > stay; end -=", "end = k; end > stay + 1; end -=", "top_k"),
        ("step", "    found.merge(best, best_rows, k);\n  }\n}", "  }\n}", "top_k"),
    ],
    "table_sketch.cu": [
        ("step", "    if (known > kMost) relaxed_store(&counters[c], kMost);\n", "", "table and one_id"),
        ("bound", "& (2 * kMost + 1);", "& (2 * kMost);", "table and one_id"),
        ("sign", "&alone[c == 0 ? 0 : 1]", "&alone[0]", "table and sketches"),
        ("sign", "min(times, kMost - value)", "times", "table and one_id"),
        ("step", "static_cast<unsigned>(__popc(same))", "1u", "table and one_id"),
    ],
    "table_shards.cu": [
        ("sign", "(address - static_cast", "(address + static_cast", "shards"),
        ("bound", "words[s] = rows;", "words[s] = rows - 1;", "shards"),
    ],
    "route.cu": [
        ("sign", "keys[middle] < rank ||", "keys[middle] <= rank ||", "route"),
        ("bound", "sorted.values[middle] < start)", "sorted.values[middle] <= start)", "route"),
        ("bound", "id >= tables[t].size", "id > tables[t].size", "route and bad_id"),
        ("step", " && position >= starts[value.table]", "", "route"),
        ("sign", "distinct ? 0 : 1", "distinct ? 1 : 0", "route"),
        ("step", "if (first != i) places[i] = place;", "", "route"),
    ],
}
MUTATIONS = [Mutation(file, *fault) for file, faults in FAULTS.items() for fault in faults]

TABLE = Table(
    name="cuda",
    folder="csrc/cuda",
    kinds=KINDS,
    mutations=MUTATIONS,
    build=("-c", "from emulation.build import build; build()"),
    built=(".cache/emulated",),
    environment={"CXX": f"{os.environ.get('CXX', 'g++')} -w"},  # a fault may leave something unused
    endless=True,
)


def problems() -> Iterator[str]:
    """Yield what is wrong with this table alone: files with too few kinds of faults."""
    kinds = Counter(file for file, _ in {(m.file, m.kind) for m in MUTATIONS})
    for path in sorted((ROOT / TABLE.folder).glob("*.cu")):
        if kinds[path.name] < 2:
            yield f"{path.name} has {kinds[path.name]} kinds of faults, at least 2 of {KINDS} are wanted"
