"""A trained GraphSAGE in a file: its sizes and its weights, checked when they are read; no pickle."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import numpy as np
import torch

from featstore.cli.sage import GraphSAGE
from featstore.errors import FormatError
from featstore.storage.sections import SectionFile, replacing

__all__ = ["ModelSizes", "load_model", "save_model"]

KIND = "model"


@dataclass(frozen=True)
class ModelSizes:
    """What a :class:`GraphSAGE` is made with, and the features of nodes and edges that it was trained on."""

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


def save_model(path: str | os.PathLike[str], model: GraphSAGE, sizes: ModelSizes) -> None:
    """Write a model to a file, replacing an existing one, and the remains of a killed writer."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    record = {"format": 1, "sizes": asdict(sizes), "weights": list(state)}
    with replacing(path, KIND) as writer:
        writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
        for tensor in state.values():
            writer.append(tensor.to(torch.float32).reshape(-1).numpy())


def load_model(path: str | os.PathLike[str]) -> tuple[GraphSAGE, ModelSizes]:
    """Read a model of :func:`save_model`, in evaluation mode. FormatError, CorruptionError: no model, or a damaged one."""
    file = SectionFile(path, KIND)
    try:
        record = json.loads(file[0].tobytes())
        weights = {name: torch.from_numpy(file[i + 1].copy()) for i, name in enumerate(record["weights"])}
        named = record["sizes"]
        sizes = ModelSizes(**{**named, "edge_features": tuple(named.get("edge_features", ()))})
        model = sizes.make()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in weights.items()})
    except (KeyError, TypeError, IndexError, RuntimeError) as error:
        raise FormatError(f"{os.fspath(path)}: not a model of featstore train: {error}", os.fspath(path)) from error
    finally:
        file.close()
    return model.eval(), sizes
