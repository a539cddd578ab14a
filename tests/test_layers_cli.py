"""``featstore train`` and ``pack`` with layers of a fixed size, and with one subgraph for all layers."""

from __future__ import annotations

import json

import pytest

from featstore.cli.main import main

SAMPLERS = {
    "layer": ["--sampler", "layer", "--layer-sizes", "30,40"],
    "shadow": ["--sampler", "shadow", "--fanouts", "3,2", "--layers", "3"],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_losses_under_every_strategy_and_of_a_pack(small, tmp_path, capsys, name) -> None:
    options = ["--epochs", "1", "--batch-size", "50", "--hidden", "8", "--memory", "64MiB", "--json", *SAMPLERS[name]]
    command = ["train", str(small.path), *options]

    def losses(*more: str) -> list[float]:
        assert main([*command, *more]) == 0
        return json.loads(capsys.readouterr().out)["losses"]

    expected = losses()
    assert losses("--strategy", "superbatch", "--cache", "0.2", "--length", "3") == expected
    pack = str(tmp_path / "pack")
    assert main(["pack", str(small.path), pack, "--batch-size", "50", "--memory", "64MiB", *SAMPLERS[name]]) == 0
    capsys.readouterr()
    packed = losses("--strategy", "packed", "--pack", pack)
    assert len(packed) == len(expected)


def test_what_does_not_go_together_is_refused(small, capsys) -> None:
    for arguments, message in [
        (["--sampler", "layer"], "--sampler layer needs --layer-sizes"),
        (["--sampler", "layer", "--layer-sizes", "3", "--fanouts", "4"], "--fanouts goes with other samplers, not layer"),
        (["--sampler", "layer", "--layer-sizes", "0"], "a layer has from 1"),
        (["--layer-sizes", "5,5"], "--layer-sizes goes with --sampler layer, not neighbor"),
        (["--sampler", "layer", "--layer-sizes", "5", "--layers", "2"], "--layers goes with --sampler shadow, not layer"),
    ]:
        assert main(["train", str(small.path), *arguments]) != 0
        assert message in capsys.readouterr().err
