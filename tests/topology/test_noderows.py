"""Rows of nodes of several types, against a table of all nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.topology.noderows import NodeRows, RowsOfTypes, by_type, joined_rows
from featstore.topology.types import Types


def test_without_types_a_node_has_the_row_of_its_number() -> None:
    rows, ids, values = NodeRows(5), np.array([3, 1]), np.arange(5)
    assert rows.of(ids) is ids
    assert rows.select(values) is values
    assert rows.kinds == ()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data(), st.sampled_from([np.int32, np.int64]))
def test_rows_and_values(sizes: list[int], data: st.DataObject, dtype: type) -> None:
    types = Types.of({f"t{i}": n for i, n in enumerate(sizes)}, {})
    kinds = list(types.nodes.values())
    stored = data.draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True))
    gathered = [kind for kind in stored if data.draw(st.booleans())]
    firsts = dict(zip((kind.name for kind in stored), np.cumsum([0, *(kind.n for kind in stored)]).tolist(), strict=False))
    n = sum(kind.n for kind in stored)
    row_of = {kind.first + i: firsts[kind.name] + i for kind in gathered for i in range(kind.n)}
    ids = np.array(data.draw(st.permutations(range(types.num_nodes))), dtype)[: data.draw(st.integers(0, types.num_nodes))]
    rows = RowsOfTypes(n, tuple((kind, firsts[kind.name]) for kind in gathered))
    found = rows.of(ids)
    expected = [row_of[i] for kind in gathered for i in ids.tolist() if kind.first <= i < kind.stop]
    assert found.tolist() == expected
    assert found.dtype == dtype
    assert rows.stored(ids).tolist() == expected
    assert rows.stored(ids).dtype == np.int32
    assert RowsOfTypes(2**31, rows.parts).stored(ids).dtype == np.int64
    assert ids.tolist() == ids.copy().tolist()
    values = np.random.default_rng(0).random(types.num_nodes)
    selected = rows.select(values)
    assert len(selected) == n
    assert all(selected[row] == values[node] for node, row in row_of.items())
    places = by_type(ids, kinds)
    assert sorted(np.concatenate(places).tolist()) == list(range(len(ids)))


def test_rows_are_equal_where_they_are_the_same() -> None:
    """A loader gathers features with equal rows by one plan."""
    kinds = list(Types.of({"a": 3, "b": 2}, {}).nodes.values())
    whole = RowsOfTypes(5, ((kinds[0], 0), (kinds[1], 3)))
    assert whole == RowsOfTypes(5, ((kinds[0], 0), (kinds[1], 3)))
    assert whole != RowsOfTypes(5, ((kinds[0], 0),)) == whole.only(kinds[:1])
    assert NodeRows(5).only(kinds) == NodeRows(5)
    assert whole != NodeRows(5)
    with pytest.raises(AttributeError):
        whole.n = 3  # type: ignore[misc]


def test_rows_of_columns_lie_one_behind_the_other() -> None:
    """Together they may be 2³¹ and more where nodes are not."""
    first, second = Types.of({"a": 1_200_000_000, "b": 100}, {}).nodes.values()
    columns = RowsOfTypes(1_200_000_000, ((first, 0),)), RowsOfTypes(1_200_000_100, ((first, 0), (second, 1_200_000_000)))
    joined = joined_rows(columns)
    ids = np.array([1_100_000_000, 1_200_000_005], np.int32)
    expected = [1_100_000_000, 1_200_000_000 + 1_100_000_000, 2_400_000_005]
    assert joined.n == 2_400_000_100
    assert joined.of(ids).tolist() == joined.stored(ids).tolist() == joined.of(ids.astype(np.int64)).tolist() == expected
    assert joined_rows([NodeRows(3), NodeRows(4)]) == NodeRows(7)
