"""The files and fields of a dataset under construction, and the names of its files."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import xxhash

from featstore.creation.options import CreateOptions
from featstore.creation.source import Source
from featstore.creation.steps import BuildSteps, Field, Inputs
from featstore.creation.topologyfiles import Form
from featstore.progress import Progress
from featstore.storage.catalog import EDGE, NODE, Catalog, FieldPart, FieldRecord, write_catalog
from featstore.storage.layout import RowLayout
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.types import Types

__all__ = ["Builder", "field_stem", "file_stem", "inputs_of"]


def file_stem(name: str, dot: str = ".") -> str:
    """Make a file name's part that is unique to the field ``name``, and plain whatever the field's name; ``dot`` is for dots."""
    stem = urllib.parse.quote(name, safe=" ,;@()+").replace(".", dot)
    if len(stem) > 100:  # file names have at most 255 bytes, and a letter can take 12
        stem = f"{stem[:80]}-{xxhash.xxh3_64_hexdigest(name.encode())}"
    return stem


def field_stem(prefix: str, name: str) -> str:
    """Make the beginning of the name of a field's file, given the beginning of its key, such as ``"node/paper"``."""
    return f"{_prefix(prefix)}.{file_stem(name)}"


def _prefix(key: str) -> str:
    """Make the beginning of the file names of a type's fields, before a dot; no other type has it."""
    kind, _, of = key.partition("/")
    return kind if key in (NODE, EDGE) else f"{kind}@{file_stem(of, '%2E')}"


class Builder:
    """The files and fields of a dataset under construction, step by step; ``steps`` that are done already are not made again."""

    def __init__(self, directory: str, memory: int, progress: Progress, steps: BuildSteps | None = None) -> None:
        self.directory = directory
        self.memory = memory
        self.progress = progress
        self.block_bytes = max(64 << 10, min(32 << 20, memory // 16))
        self.buffer_bytes = max(64 << 10, min(4 << 20, memory // 32))  # of a writer
        self.step = max(1024, memory // 128)  # nodes, or edges, processed at a time
        self.files: dict[str, FileRecord] = {}
        self.fields: dict[str, FieldRecord] = {}
        self.steps = BuildSteps(directory, "", Inputs(), progress=False) if steps is None else steps
        self._n_steps = 0

    def next_steps(self, n: int) -> range:
        """Number the next ``n`` steps; all callers come in the same order each time."""
        self._n_steps += n
        return range(self._n_steps - n, self._n_steps)

    def writer(self, prefix: str, name: str, layout: RowLayout, kind: str, dtype: str, stripe: str = "") -> RowFileWriter:
        """Open a writer for a field's file."""
        file = os.path.join(stripe, f"{prefix}.{file_stem(name)}.1.rows")
        return RowFileWriter(self.directory, file, layout, kind=kind, dtype=dtype, buffer_bytes=self.buffer_bytes)

    def register(self, key: str, role: str, file: FileRecord, shape: tuple[int, ...]) -> None:
        """Record a committed file as the only file of the field ``key``."""
        self.files[file.name] = file
        self.fields[key] = FieldRecord(key, role, file.dtype, shape, file.generation, (FieldPart(file.name, 0, file.n_rows),))

    def add(self, key: str, role: str, name: str, source: Source) -> None:
        """Stream one field of a type of nodes or edges, whose key is ``key``: ``NODE`` or ``EDGE`` without named types."""
        file = self._stream(key, role, name, {"": source}, lambda _: contextlib.nullcontext())
        self.register(f"{key}/{name}", role, file, source.shape)

    def add_feature(
        self, name: str, sources: Mapping[str, Source], saying: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """Stream a feature of some types of nodes, given by their names, into one file, type after type.

        So a cache, a plan and a pass serve all of them. ``saying`` names the type in errors.
        """
        file = self._stream("node/" + ",".join(sources), "feature", name, sources, saying)
        self.register_feature(name, file, {kind: source.shape for kind, source in sources.items()})

    def _stream(
        self,
        key: str,
        role: str,
        name: str,
        sources: Mapping[str, Source],
        saying: Callable[[str], AbstractContextManager[None]],
    ) -> FileRecord:
        """Write sources into one file, behind the rows that are written already, unless the file is complete."""
        (step,), steps, first = self.next_steps(1), self.steps, next(iter(sources.values()))
        field = Field(sum(each.n_rows for each in sources.values()), first.shape[1:], first.dtype)
        if steps.is_done(step):
            self.progress.add(field.n_rows * field.row_bytes)
            return steps.file(step)
        with steps.leaving():
            writer = steps.writer(step, field, self.buffer_bytes, name=f"{field_stem(key, name)}.1.rows", kind=role)
            done = writer.n_rows
            self.progress.add(done * field.row_bytes)
            for kind, source in sources.items():
                with saying(kind):
                    for block in source.blocks_from(min(done, source.n_rows), self.block_bytes):
                        writer.write(block)
                        self.progress.add(block.nbytes)
                        steps.checkpoint()
                done = max(0, done - source.n_rows)
            steps.finish(step)
        return steps.file(step)

    def register_feature(self, name: str, file: FileRecord, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Record a committed file that holds a feature of some types of nodes, type after type."""
        self.files[file.name] = file
        at = 0
        for kind, shape in shapes.items():
            part = FieldPart(file.name, 0, shape[0], None if len(shapes) == 1 else at)
            key = f"node/{kind}/{name}"
            self.fields[key] = FieldRecord(key, "feature", file.dtype, shape, file.generation, (part,))
            at += shape[0]

    def finish(
        self, types: Types, form: Form, more: Mapping[str, Any] | None = None, extra: Mapping[str, dict[str, Any]] | None = None
    ) -> None:
        """Write the catalog, after which the build directory is a dataset.

        ``more`` are further members of the entry of the dataset, ``extra`` are other entries.
        """
        dataset: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "generation": 1,
            "num_nodes": types.num_nodes,
            "num_edges": types.num_edges,
            **types.entry(),
            **form.entry(),
            "created_by": f"featstore {_release()}",
            **(more or {}),
        }
        write_catalog(self.directory, Catalog(dataset, self.files, self.fields, dict(extra or {})))


def inputs_of(inputs: Inputs | None, options: CreateOptions) -> Inputs:
    """Add to a recipe what making a dataset adds. With stripes no call goes on, as their files lie elsewhere."""
    if inputs is None or options.form.stripes:
        return Inputs(None, {} if inputs is None else inputs.counts)
    return inputs.with_options(form=options.form.entry(), cleaning=vars(options.cleaning), release=_release())


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"
