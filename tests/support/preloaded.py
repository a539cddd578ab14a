"""All that programs and campaigns import, for the process that they are forked from: see :mod:`tests.support.programs`."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import hypothesis.extra.numpy
import matplotlib.figure
import pytest
import scipy.sparse
import torch
import torch._dynamo  # an optimizer imports it when it is made

import featstore
import featstore.adapters.pyg
import featstore.cli.train
import tests.support.pyg
from featstore.testing import faults

featstore.open  # noqa: B018 - all that its public names are imported from
faults._library()
gc.freeze()  # a collection in a fork would copy the pages of all that was imported
