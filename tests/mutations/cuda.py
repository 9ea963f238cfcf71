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

MUTATIONS = [
    Mutation("bags.cu", "step", "(given[b]) : entries", "(given[b]) : entries - 1", "embedding_bag"),
    Mutation("bags.cu", "bound", "offset < given[b - 1]", "offset <= given[b - 1]", "embedding_bag"),
    Mutation("bags.cu", "bound", "b == all && offset", "b > all && offset", "recorded"),
    Mutation("bags.cu", "sign", "bags[i] = bag_of(i)", "bags[i] = -bag_of(i)", "weights_backward"),
    Mutation("embedding.cu", "bound", "bad >= rows", "bad > rows", "recorded"),
    Mutation("embedding.cu", "step", "      any_bad = any_bad || !in_range;\n", "", "recorded"),
    Mutation("embedding.cu", "bound", "tile.column < units)", "tile.column <= units)", "embedding and not bag"),
    Mutation("embedding.cu", "step", "+ kRowsInFlight - 1) / kRows", ") / kRows", "lookups"),
    Mutation("quantized.cu", "bound", "index >= 0 && index < rows;", "index >= 0 && index <= rows;", "quantized"),
    Mutation("quantized.cu", "sign", ": c % 2 * 4;", ": (c + 1) % 2 * 4;", "quantized"),
    Mutation("quantized.cu", "step", "bias = read_at<float, (width > 1)>(end + 4);", "bias = 0;", "quantized"),
    Mutation("table_shards.cuh", "bound", "lanes_log2) / 2; step", "lanes_log2) / 4; step", "weights_backward"),
    Mutation("embedding_backward.cu", "step", "A(0) : weight / divisor", "A(0) : weight", "gradients_of_bags"),
    Mutation("embedding_backward.cu", "sign", "Divisor::kCount : ", "Divisor::kOne : ", "dense_backward"),
    Mutation(
        "embedding_collection.cu", "sign", "if (per_sample_weights) {", "if (!per_sample_weights) {", "collection"
    ),
    Mutation(
        "embedding_collection.cu", "step", "      in.weights = call.data<T>(*per_sample_weights);\n", "", "single_ones"
    ),
    Mutation("embedding_collection.cuh", "bound", "std::min(of_key[key], ", "std::max(of_key[key], ", "bad_values"),
    Mutation("embedding_collection.cuh", "bound", "return most * items;", "return items;", "gradients_equal"),
    Mutation("embedding_collection_forward.cuh", "sign", "mode) != of_", "mode) == of_", "single_ones"),
    Mutation("embedding_collection_backward.cu", "sign", "first_rows[w];\n  }\n}", "0;\n  }\n}", "gradients_equal"),
    Mutation(
        "embedding_collection_backward.cu", "bound", "bounds, tables, g + 1)", "bounds, tables, g)", "gradients_equal"
    ),
    Mutation(
        "embedding_collection_groups.cuh",
        "bound",
        "*runs.count - 1, row)",
        "*runs.count - 1, row + 1)",
        "gradients_equal",
    ),
    Mutation(
        "embedding_collection_groups.cu",
        "bound",
        "lookup_count, entry + 1) - 1",
        "lookup_count, entry) - 1",
        "gradients_eq",
    ),
    Mutation("embedding_collection_groups.cu", "step", "    positions.move(j, entry);\n", "", "gradients_equal"),
    Mutation("embedding_collection_groups.cu", "sign", "rows > kLargestKey ||", "rows < 0 ||", "beyond_32_bits"),
    Mutation("embedding_collection_groups.cu", "step", "A(0) : weight / divisor;", "A(0) : weight;", "gradients_equal"),
    Mutation(
        "embedding_collection_groups.cuh", "sign", ".positions[j]) this", ".positions[0]) this", "gradients_equal"
    ),
    Mutation(
        "embedding_collection_current.cu", "sign", "index == p.padding_idx) continue", "false) continue", "as_of_now"
    ),
    Mutation("embedding_collection_current.cu", "step", "rounded_weight(optimizer, now[c])", "now[c]", "as_of_now"),
    Mutation(
        "embedding_collection_update.cu", "bound", "mine.entries > kPiece", "mine.entries > 2 * kPiece", "updates"
    ),
    Mutation("embedding_collection_update.cu", "sign", " - in.first_rows[found.w]", "", "updates"),
    Mutation("uploads.cu", "step", " || sent.words != words", "", "sent_again"),
    Mutation("uploads.cu", "sign", " && !is_capturing(call.stream())", "", "captured"),
    Mutation("pool_plan.cu", "step", "    if (plan.slots != nullptr) plan.slots[number] = slot;\n", "", "updates"),
    Mutation(
        "embedding_collection_weights_backward.cu",
        "sign",
        "gradient : result + gradient",
        "gradient : result - gradient",
        "of_weights",
    ),
    Mutation("embedding_collection_weights_backward.cu", "bound", "w.keys, bag + 1)", "w.keys, bag)", "of_weights"),
    Mutation(
        "embedding_collection_weights_backward.cu", "step", "rounded_weight(optimizer, now[c])", "A(0)", "as_of_now"
    ),
    Mutation("pool_parts_kernels.cuh", "bound", "next = bag + 1;", "next = bag + 2;", "single_ones"),
    Mutation("pool_parts_kernels.cuh", "sign", "shares[other * lanes", "shares[lanes", "single_ones"),
    Mutation("pool_parts.cuh", "bound", "[begin + mine] <= x", "[begin + mine] < x", "many_tables"),
    Mutation("pool_plan.cu", "bound", "parts.count, bag + 1) - 1", "parts.count, bag) - 1", "single_ones"),
    Mutation("embedding_ids.cu", "sign", "> acc_t<W>(0))) return", "< acc_t<W>(0))) return", "pruned"),
    Mutation("embedding_ids.cu", "bound", "while (to < end &&", "while (to + 1 < end &&", "pruned"),
    Mutation("embedding_ids.cu", "bound", "row < sizes[shard]", "row <= sizes[shard]", "shard"),
    Mutation("embedding_ids.cu", "step", "      kept = false;\n", "", "bad_entries"),
    Mutation("embedding_shards.cu", "sign", "norm < max_norm ? g[c]", "norm > max_norm ? g[c]", "clip_rows"),
    Mutation("embedding_shards.cu", "bound", "b <= entries; b", "b < entries; b", "shards"),
    Mutation("pool.cuh", "sign", "(with_row - with_output", "(with_row + with_output", "weights_backward"),
    Mutation(
        "embedding_weights_backward.cu",
        "step",
        "products.with_row = team_sum(tiling, products.with_row);",
        "",
        "weights_backward",
    ),
    Mutation("embedding_weights_backward.cu", "bound", "index != w.padding_idx && bag", "bag", "weights_backward"),
    Mutation(
        "errors.h",
        "step",
        "= atomicCAS(&record->first, first, static_cast<unsigned long long>(kNoError));",
        "= first;",
        "recorded",
    ),
    Mutation("errors.h", "sign", "if (seen == first) {", "if (atomicExch(&record->first, ~0ull), true) {", "lost"),
    Mutation("errors.cu", "bound", "(uint64_t{1} << kPositionBits) - 1", "(uint64_t{1} << 2) - 1", "recorded"),
    Mutation("errors.cu", "step", " - static_cast<uint64_t>(e.begin);", ";", "own_table"),
    Mutation("errors.cu", "sign", 'must not decrease, got ", e.bound', 'must not decrease, got ", e.value', "recorded"),
    Mutation("hash.cu", "sign", "below_zero ? 0 - word : word", "below_zero ? word : word", "to_hash_bucket_strong"),
    Mutation("hash.cu", "bound", "n >= 4) return farm", "n > 4) return farm", "to_hash_bucket"),
    Mutation("hash.cu", "sign", "negative ? 0 - bits : bits", "negative ? bits : bits", "to_hash_bucket"),
    Mutation("hash.cu", "step", "    v -= divisor;\n    ++quotient;\n", "", "hash"),
    Mutation("hash_cross.cu", "bound", "rows + 1, i + 1) - 1", "rows + 1, i) - 1", "cross_hashed"),
    Mutation("hash_cross.cu", "sign", "number -= place * inner", "number += place * inner", "cross_hashed"),
    Mutation("hash_cross.cu", "step", "counts[row] = valid ? count : 0", "counts[row] = count", "cross"),
    Mutation("hash_strings.cu", "bound", "end <= size;", "end < size;", "string_to_hash"),
    Mutation("hash_strings.cu", "step", "(offset_ + n) % 4}; }", "offset_}; }", "string_to_hash"),
    Mutation("pool_extremes.cuh", "sign", "offered > value[c]", "offered < value[c]", "pooled_bags and max"),
    Mutation("pool_extremes.cu", "sign", "winners[c] != p", "winners[c] == p", "gradients_of_bags and max"),
    Mutation("pool_extremes.cu", "step", "    view.positions = positions;\n", "", "gradients_of_bags and max"),
    Mutation("pool_extremes.cuh", "sign", "entry.negated ? -x : x", "x", "pooled_bags and max"),
    Mutation("pool_extremes.cuh", "bound", "later.winner[c] >= 0", "later.winner[c] > 0", "pooled_bags and max"),
    Mutation("pool_extremes.cuh", "step", "      winner[c] = j;\n", "", "pooled_bags and max"),
    Mutation("pool_plan.cu", "bound", "begin + k * kPiece", "begin + k * (kPiece - 1)", "pooled_bags"),
    Mutation("pool_plan.cu", "sign", "end - begin <= kEnt", "end - begin >= kEnt", "pooled_bags"),
    Mutation("pool_plan.cu", "step", "    relaxed_store(&plan.found[3], 1ull);\n", "", "offsets_without_sense"),
    Mutation("pool_rows.cu", "sign", "!= nullptr || pooling.scales !=", "== nullptr || pooling.scales !=", "pooled"),
    Mutation(
        "pool_rows.cu",
        "step",
        "  if (pooling.weights != nullptr) return pool_weighted_rows(call, pooling);\n",
        "",
        "pooled",
    ),
    Mutation("pool_scaled.cu", "sign", "c, entry.scale *", "c, -entry.scale *", "gradients_of_bags"),
    Mutation(
        "pool_scaled.cu", "sign", "!= nullptr ? p.coefficients", "== nullptr ? p.coefficients", "gradients_of_bags"
    ),
    Mutation("pool_scaled.cu", "step", "    this->count_entry();\n", "", "gradients_of_bags"),
    Mutation("pool_weighted.cuh", "sign", "sums.add(c, scale *", "sums.add(c, -scale *", "pooled"),
    Mutation("pool_weighted.cuh", "sign", "sums.add(1, weight * weight)", "sums.add(1, weight)", "pooled and sqrtn"),
    Mutation("pool_weighted.cuh", "step", "    weights.merge(later.weights);\n", "", "pooled and mean"),
    Mutation("pool_weighted.cu", "sign", "weight * entry.coefficient", "weight", "embedding_bag_shards"),
    Mutation("pool_weighted.cu", "bound", "(pooling.bags);", "(pooling.bags - 1);", "gradients_of"),
    Mutation("primitives.cu", "sign", "cuda::std::plus<int64_t>", "cuda::std::minus<int64_t>", "unique"),
    Mutation("primitives.cu", "bound", "int64_t{0}, n + 1", "int64_t{0}, n", "unique"),
    Mutation("primitives.cu", "bound", "n, 0, bits", "n, 0, bits - 1", "segment and grad"),
    Mutation("primitives.cu", "step", "{keys.Current(),", "{from.keys,", "segment and grad"),
    Mutation("primitives.cu", "sign", "!= keys[j - 1]", "== keys[j - 1]", "grad_v2"),
    Mutation(
        "row_groups.cu",
        "bound",
        "write_offsets(keys, entries, rows, ",
        "write_offsets(keys, entries, rows - 1, ",
        "reduce_grad",
    ),
    Mutation("row_groups.cu", "step", 'have entries") - 1', 'have entries")', "grad_v2"),
    Mutation("row_groups.cu", "sign", "keys[present.offsets[r]]", "keys[present.offsets[0]]", "grad_v2"),
    Mutation("segment_ids.cuh", "bound", "id < segment_ids[i - 1]", "id <= segment_ids[i - 1]", "segment"),
    Mutation("row_optimizer.cu", "bound", "first_block <= block", "first_block < block", "many_tables"),
    Mutation("row_optimizer.cu", "sign", "if (row <= before)", "if (row < before)", "skipped_and"),
    Mutation("row_optimizer.cu", "bound", "row >= rows) {", "row > rows) {", "own_table"),
    Mutation("row_optimizer.cu", "step", "store(column, zeros);", ";", "read_as_zeros"),
    Mutation("row_optimizer.cu", "sign", "result.now = arguments.now", "result.now = arguments.step", "many_tables"),
    Mutation("row_optimizer.cu", "step", "work.rows != nullptr && skips", "skips", "zeros"),
    Mutation("row_optimizer.cuh", "step", "      if (is_zero) return;\n", "", "collection"),
    Mutation("row_optimizer_columns.cuh", "sign", "return !team.any(found);", "return team.any(found);", "zeros"),
    Mutation("row_optimizer.cu", "step", "  append_map(history, at, leaf);\n", "", "row_optimizer_advance"),
    Mutation("row_optimizer.cuh", "step", "  team.wait();  // until all lanes have read\n    A", "  A", "many_tables"),
    Mutation("row_optimizer.cuh", "bound", "if (column + c < table_.columns) rule", "rule", "beyond_the_last"),
    Mutation("row_optimizer.cuh", "sign", "table_.columns <= tile", "table_.columns >= tile", "wider_than_a_team"),
    Mutation("row_optimizer.cuh", "step", "return adam().second(own_);", "return own_;", "partial_rowwise"),
    Mutation("row_optimizer.cuh", "step", "sums[c] = term.d * sums[c] + term", "sums[c] = term", "sums_in_parts"),
    Mutation("row_optimizer.cuh", "step", "      if (in_parts_) {", "      if (false) {", "sums_in_parts"),
    Mutation("row_optimizer.cuh", "bound", "max(int64_t{0}, static_cast<int64_t>(", "((", "row_optimizer"),
    Mutation("row_optimizer_columns.cuh", "bound", "if (c < count) to[c] = f(c);", "to[c] = f(c);", "tables_of_all"),
    Mutation("row_optimizer_columns.cuh", "bound", "step = lanes() / 2", "step = lanes() / 4", "wider_than_a_team"),
    Mutation("row_optimizer_columns.cuh", "sign", "return sign * factor", "return factor", "direction"),
    Mutation("row_update.cu", "bound", "j + k < entries", "j + k + 1 < entries", "row_update and by_hand"),
    Mutation("row_update.cu", "bound", "key >= rows || tile", "key > rows || tile", "skipped_by"),
    Mutation("row_update.cu", "sign", "key(tile.row - 1) != key", "key(tile.row - 1) == key", "row_update"),
    Mutation(
        "row_update.cu", "step", "    store_vector<T, width>(weight, row.weight);\n", "", "row_update and by_hand"
    ),
    Mutation("row_update.cu", "bound", "aligned && stride % width == 0", "aligned", "strides_of_their_own"),
    Mutation("row_update.cu", "step", "store_vector<T, width>(weight, row.weight);", "", "row_update and by_hand"),
    Mutation("sparse_segment.cu", "sign", "A(1) / (reduction", "A(-1) / (reduction", "reduce_grad"),
    Mutation("segment_ids.cuh", "bound", "entries, segments, offsets);", "entries, segments - 1, offsets);", "segment"),
    Mutation(
        "segment_ids.cuh", "bound", "begin_lanes >> (lane + 1)", "begin_lanes >> (lane + 2)", "gradients_of_segments"
    ),
    Mutation("sparse_segment.cu", "step", "n : sqrt(n)", "n : n", "reduce_grad"),
    Mutation("sparse_tensor.cu", "bound", "id < 0 || id >= rows", "id < 0 || id > rows", "name_the_argument"),
    Mutation("sparse_tensor.cu", "bound", "rows + 1, i + 1) - 1", "rows + 1, i) - 1", "offsets_to_row_ids"),
    Mutation("sparse_tensor.cu", "sign", "offset < offsets[r - 1]", "offset > offsets[r - 1]", "offsets_to_row_ids"),
    Mutation("sparse_tensor.cu", "step", "  write_offsets(row_ids, items, rows, offsets);\n", "", "row_ids_to_offsets"),
    Mutation("sparse_tensor_order.cu", "sign", " ^ kSign;", ";", "reorder"),
    Mutation("sparse_tensor_order.cu", "step", " std::swap(from, spare);", ";", "reorder"),
    Mutation("sparse_tensor_order.cu", "bound", "if (element > before)", "if (element >= before)", "name_the_argument"),
    Mutation("sparse_tensor_order.cu", "bound", "static_cast<P>(i + 1)", "static_cast<P>(i)", "sparse_to_dense"),
    Mutation(
        "sparse_tensor_rows.cu", "bound", "if (row < before) atomicMax", "if (row < before - 1) atomicMax", "fill"
    ),
    Mutation("sparse_tensor_rows.cu", "bound", "while (num_rows >> bits != 0)", "while (num_rows >> bits > 1)", "fill"),
    Mutation("sparse_tensor_rows.cu", "bound", "half = kThreads / 2", "half = kThreads / 4", "fill_empty_rows_grad"),
    Mutation(
        "sparse_tensor_rows.cu",
        "step",
        "  sums[threadIdx.x] = value;\n  __syncthreads();",
        "  sums[threadIdx.x] = value;",
        "fill_empty_rows_grad",
    ),
    Mutation("segment_entries.cu", "bound", "if (id >= segments) errors", "if (id > segments) errors", "segment"),
    Mutation("segment_entries.cu", "sign", "sources == nullptr ? e", "sources != nullptr ? e", "segment"),
    Mutation("segment.cu", "sign", "x > total || x != x", "x < total || x != x", "segment"),
    Mutation("segment.cu", "sign", "extreme(reduction) ? o", "divided(reduction) ? o", "segment"),
    Mutation("segment.cu", "step", "    if (later.count == 0) return;\n", "", "segment"),
    Mutation("segment.cu", "bound", "count += later.count", "count += 0", "segment"),
    Mutation("segment_backward.cu", "sign", "zeros == 1 ? share", "zeros == 2 ? share", "segment"),
    Mutation("segment_backward.cu", "step", "      this->count[c] += times;\n", "", "segment"),
    Mutation("segment_backward.cu", "bound", "segment >= 0 &&", "segment > 0 &&", "segment"),
    Mutation("segment_backward.cu", "sign", "n : sqrt(n)", "sqrt(n) : n", "segment"),
    Mutation(
        "unique.cuh", "sign", "if (found > entry) found = atomicMin", "if (found < entry) found = atomicMin", "unique"
    ),
    Mutation("unique.cu", "bound", "number[k] >= kCounters", "number[k] > kCounters", "with_counts"),
    Mutation(
        "unique.cu",
        "step",
        "  __syncthreads();\n  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
        "  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
        "with_counts",
    ),
    Mutation("unique.cu", "step", "counters[c] = 0;\n  __syncthreads();", "counters[c] = 0;", "with_counts"),
    Mutation("table.cuh", "sign", "kPassedWord] == 0) break", "kPassedWord] != 0) break", "table and collide"),
    Mutation("table.cuh", "step", "      ++passes(place.region + passed);\n", "", "table and programs"),
    Mutation("table.cuh", "bound", "more = here[kAhead - 1];", "more = false;", "table and batches"),
    Mutation("table.cuh", "sign", "zeros >> 7) * 0x10204080u", "zeros >> 7) * 0x10204040u", "table and batches"),
    Mutation("table.cu", "sign", ") != claim_of(i)", ") == claim_of(i)", "table and batches"),
    Mutation("table.cu", "step", "    relaxed_store(&entry[1], kFreeEntry);\n", "", "table and programs"),
    Mutation("table.cu", "bound", "(regions >> bits) != 0", "(regions >> bits) > 1", "table and batches"),
    Mutation("table.cu", "step", "  write(kSecondFactor, factors.second);\n", "", "with_a_seed"),
    Mutation("table.cuh", "bound", "seeded[2 * which + 1])", "seeded[2 * which])", "with_a_seed"),
    Mutation(
        "table_insert.cu", "step", "if (found > position) atomicMin(&slots[slot], position);", "", "table and batches"
    ),
    Mutation("table_insert.cu", "sign", "ids[found] != key || ", "", "table and batches"),
    Mutation("table_insert.cu", "sign", " || !part.has(found)", "", "table and one_pass"),
    Mutation("table_insert.cu", "bound", "parts[middle].end <= i", "parts[middle].end < i", "table and one_pass"),
    Mutation("table_insert.cu", "step", "- before[part.begin]; }", "- before[part.begin] / 2; }", "table and one_pass"),
    Mutation("table_insert.cu", "step", "    relaxed_store(&in.refused[p], 1);\n", "", "table and told"),
    Mutation("table_insert.cu", "bound", "value <= most", "value <= most + 1", "table and told"),
    Mutation("table_insert.cu", "bound", "slot + 1 == capacity ?", "slot == capacity ?", "table and collide"),
    Mutation("table_insert.cu", "bound", "k < reusable())", "k <= reusable())", "table and programs"),
    Mutation("table_insert.cu", "step", "      part.table.erase(key, in.taken[i]);\n", "", "table and run_out"),
    Mutation("table_insert.cu", "sign", "missing.first_of(i) == i)", "missing.first_of(i) != i)", "table and batches"),
    Mutation("table_insert.cu", "sign", "(was_there || in.frequencies == nullptr)", "true", "table and programs"),
    Mutation(
        "table_insert.cu",
        "bound",
        "      atomicMin(&halves[0], kMost);  // whoever has gone beyond the most goes back to it\n",
        "",
        "table and frequencies",
    ),
    Mutation("table_rows.cu", "bound", "row >= table_rows && tile", "row > table_rows && tile", "recorded"),
    Mutation("table_rows.cu", "sign", "!= pairs.keys[tile.row];", "== pairs.keys[tile.row];", "table and assignment"),
    Mutation("table_rows.cu", "step", "k == c ? value : result.at[k]", "value", "table and lookup"),
    Mutation("table_rows.cu", "bound", "alignment % 16 == 0", "alignment % 4 == 0", "table and assignment"),
    Mutation(
        "table_sketch.cu",
        "step",
        "    if (known > kMost) relaxed_store(&counters[c], kMost);\n",
        "",
        "table and one_id",
    ),
    Mutation("table_sketch.cu", "bound", "& (2 * kMost + 1);", "& (2 * kMost);", "table and one_id"),
    Mutation("table_sketch.cu", "sign", "&alone[c == 0 ? 0 : 1]", "&alone[0]", "table and sketches"),
    Mutation("table_sketch.cu", "sign", "min(times, kMost - value)", "times", "table and one_id"),
    Mutation("table_sketch.cu", "step", "static_cast<unsigned>(__popc(same))", "1u", "table and one_id"),
    Mutation("uploads.cu", "step", "to + begin);", "to);", "many_shards"),
    Mutation("table_shards.cu", "sign", "(address - static_cast", "(address + static_cast", "shards"),
    Mutation("table_shards.cu", "bound", "words[s] = rows;", "words[s] = rows - 1;", "shards"),
    Mutation("table_shards.cuh", "bound", "shards, r + 1)", "shards, r)", "shards"),
    Mutation("route.cu", "sign", "keys[middle] < rank ||", "keys[middle] <= rank ||", "route"),
    Mutation("route.cu", "bound", "sorted.values[middle] < start)", "sorted.values[middle] <= start)", "route"),
    Mutation("route.cu", "bound", "id >= tables[t].size", "id > tables[t].size", "route and bad_id"),
    Mutation("route.cu", "step", " && position >= starts[value.table]", "", "route"),
    Mutation("route.cu", "sign", "distinct ? 0 : 1", "distinct ? 1 : 0", "route"),
    Mutation("route.cu", "step", "if (first != i) places[i] = place;", "", "route"),
    Mutation("unique.cu", "step", "return u == units;", "return true;", "rows_made_to_collide"),
    Mutation(
        "sparse_segment.cu", "bound", "id >= 0 && id < segments) return", "id >= 0 && id <= segments) return", "segment"
    ),
    Mutation("unique.cuh", "bound", "slot = slot + 1 == capacity ? 0 : slot + 1", "slot = slot + 1", "unique"),
    Mutation(
        "table_insert.cu", "sign", "part.counters[kUsed] += given - reused;", "part.counters[kUsed] += given;", "table"
    ),
    Mutation(
        "table_rows.cu",
        "sign",
        "tile.row + 1 == entries || pairs.keys[tile.row + 1] != pairs.keys[tile.row]",
        "tile.row == 0 || pairs.keys[tile.row - 1] != pairs.keys[tile.row]",
        "table",
    ),
    Mutation(
        "row_update.cu",
        "sign",
        "store_vector<T, width>(tables.state[s] + key * tables.state_stride[s]",
        "store_vector<T, width>(tables.state[s] + key * tables.weight_stride",
        "row_update",
    ),
    Mutation("hash_cross.cu", "bound", "columns.width(c, row), most + 1)", "columns.width(c, row), most)", "cross"),
    Mutation(
        "embedding_collection_groups.cu",
        "bound",
        "index == lookup.rows && lookup.padding_idx == lookup.rows",
        "index == lookup.rows",
        "collection",
    ),
    Mutation(
        "embedding_collection_update.cu",
        "sign",
        "in.slots[group_of_block(in, mine.w, block)] * in.stride",
        "in.slots[block] * in.stride",
        "collection",
    ),
    Mutation("pool_plan.cu", "step", "first_total + k, part}", "first_total, part}", "pooled or bag or segment"),
    Mutation("sparse_tensor_rows.cu", "sign", "= d == 0 ? row : 0;", "= row;", "fill"),
    Mutation(
        "segment.cu",
        "step",
        "count == 0 ? later.value[c] : operation.fold(value[c], later.value[c])",
        "operation.fold(value[c], later.value[c])",
        "segment",
    ),
    Mutation("segment_backward.cu", "step", "      this->count[c] += later.count[c];\n", "", "segment"),
    Mutation(
        "errors.cu",
        "sign",
        '"[", position, ", ", e.column, "]")',
        '"[", e.column, ", ", position, "]")',
        "recorded or error or name",
    ),
    Mutation(
        "embedding_ids.cu",
        "bound",
        "keep_padding && id == total;",
        "keep_padding && id >= total;",
        "shard or lookup or pruned",
    ),
    Mutation("unique.cu", "sign", "hashes[position] != value.hash", "hashes[position] == value.hash", "unique_rows"),
]

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
