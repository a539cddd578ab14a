"""A trained model in a file: its sizes and its weights, checked when they are read; no pickle."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from featstore.cli.sage import GraphSAGE, HeteroSAGE
from featstore.errors import FormatError
from featstore.storage.sections import SectionFile, replacing
from featstore.topology.types import EdgeKey

__all__ = ["HeteroSizes", "Model", "ModelSizes", "Sizes", "load_model", "save_model"]

KIND = "model"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a :class:`GraphSAGE`, and the features of nodes and edges that it was trained on."""

    feature: str
    n_in: int
    hidden: int
    n_out: int
    n_layers: int
    edge_features: tuple[str, ...] = ()
    n_edge: int = 0

    def make(self, dropout: float = 0.0) -> GraphSAGE:
        """Make a model of these sizes."""
        return GraphSAGE(self.n_in, self.hidden, self.n_out, self.n_layers, dropout, self.n_edge)


@dataclass(frozen=True)
class HeteroSizes:
    """Sizes of a :class:`HeteroSAGE`, and the feature that it was trained on; ``widths`` has 0 for types without it."""

    feature: str
    widths: dict[str, int]
    edge_types: tuple[EdgeKey, ...]
    target: str
    hidden: int
    n_out: int
    n_layers: int

    def make(self, dropout: float = 0.0) -> HeteroSAGE:
        """Make a model of these sizes."""
        return HeteroSAGE(self.widths, self.edge_types, self.target, self.hidden, self.n_out, self.n_layers, dropout)


Model: TypeAlias = GraphSAGE | HeteroSAGE
Sizes: TypeAlias = ModelSizes | HeteroSizes


def save_model(path: str | os.PathLike[str], model: Model, sizes: Sizes) -> None:
    """Write a model to a file, replacing an existing one, and the remains of a killed writer."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    record = {"format": 1, "sizes": asdict(sizes), "weights": list(state)}
    with replacing(path, KIND) as writer:
        writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
        for tensor in state.values():
            writer.append(tensor.to(torch.float32).reshape(-1).numpy())


def load_model(path: str | os.PathLike[str]) -> tuple[Model, Sizes]:
    """Read a model of :func:`save_model`, in evaluation mode. FormatError, CorruptionError: no model, or a damaged one."""
    file = SectionFile(path, KIND)
    try:
        record = json.loads(file[0].tobytes())
        weights = {name: torch.from_numpy(file[i + 1].copy()) for i, name in enumerate(record["weights"])}
        sizes = _sizes(record["sizes"])
        if sizes.n_layers > len(weights):
            raise ValueError(f"{sizes.n_layers} layers of {len(weights)} weights")
        with torch.device("meta"):  # nothing is allocated for sizes that the weights do not have
            model = sizes.make()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in weights.items()}, assign=True)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise FormatError(f"{os.fspath(path)}: not a model of featstore train: {error}", os.fspath(path)) from error
    finally:
        file.close()
    return model.eval(), sizes


def _sizes(named: dict[str, Any]) -> Sizes:
    if "target" not in named:
        return ModelSizes(**{**named, "edge_features": tuple(named.get("edge_features", ()))})
    return HeteroSizes(**{**named, "edge_types": tuple((a, b, c) for a, b, c in named["edge_types"])})
