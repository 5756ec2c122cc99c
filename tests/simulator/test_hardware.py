"""Known devices, clusters by name, and collectives against closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.simulator.cluster import Cluster, Links
from hetero_strategy.simulator.cost_model import MIXED, Precision, block_lines
from hetero_strategy.simulator.hardware import _FIELDS, DEVICES, LINK_SHARE, LINKS, NODES, cluster, this_cluster
from hetero_strategy.testing.plans import model

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))


def test_every_device_comes_in_a_node_and_says_its_source() -> None:
    assert set(DEVICES) == set(NODES)
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        assert 0 < device.matmul <= 1
        assert 0 < device.attention <= 1
        assert {*NODES[name][1:]} <= set(LINKS)


@pytest.mark.parametrize(
    ("name", "there", "device", "memory"),
    [
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100", 80e9),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100", 42e9),
        ("NVIDIA H200", 150e9, "h200", 141e9),
        ("NVIDIA GH200 480GB", 102e9, None, 0),
        ("NVIDIA RTX A4000", 16e9, None, 0),
    ],
)
def test_a_plan_that_is_made_where_it_runs_knows_the_device_and_the_memory_it_has(
    monkeypatch: pytest.MonkeyPatch, name: str, there: float, device: str | None, memory: float
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=there))
    if device is None:
        with pytest.raises(ConfigError, match=f"nothing is known of {name}"):
            this_cluster(torch.device("cuda"), 1, 8)
    else:
        found = this_cluster(torch.device("cuda"), 1, 8).device
        assert (found.name, found.memory) == (device, memory)


def test_wide_numbers_have_a_peak_of_their_own() -> None:
    """Without TF32; processors have one figure."""
    for device in DEVICES.values():
        assert device.peak(2) == device.flops and (device.peak(4) < 0.3 * device.flops or device.name == "cpu")
    shape, layout = model().modules["llm"], ModuleLayout((0,))
    narrow, wide = (
        block_lines(shape, layout, cluster("h100", 1), True, 0.0, p)[0][0] for p in (MIXED, Precision(4, 4))
    )
    assert wide.per_row > 10 * narrow.per_row


def test_narrow_matmuls_reach_less_and_divided_ones_less_again() -> None:
    """As published: a model of width 2048 loses 11% to one of 4096, tensor parallelism of 8 a quarter."""
    device = DEVICES["h100"]
    assert device.matmul_share(4096, 2) == device.matmul == pytest.approx(0.504)
    narrow, divided, wide = (device.matmul_share(*sizes) for sizes in ((2048, 1), (4096, 8), (18432, 8)))
    assert narrow == pytest.approx(0.45, abs=0.01) and divided == pytest.approx(0.395, abs=0.01)
    assert 0.504 < wide < 0.57
    assert DEVICES["cpu"].matmul_share(64, 4) == DEVICES["cpu"].matmul
    assert replace(device, matmul=1.0).matmul_share(18432, 1) == 1.0


def test_a_cluster_has_what_was_asked_for() -> None:
    found = cluster("h100", 16)
    assert (found.ranks, found.ranks_per_node, found.device.flops) == (128, 8, 989e12)
    assert found.within.bandwidth == pytest.approx(LINK_SHARE * 450e9)
    assert found.across.bandwidth == pytest.approx(LINK_SHARE * 50e9)  # 400 Gb/s
    assert cluster("cpu", 1, 4, cores_per_node=2).cores_per_node == 2
    other = cluster("h100", 2, 4, "200g", "pcie5", memory=96e9, across_bandwidth=1e9, within_latency=0.0)
    assert (other.ranks, other.device.memory) == (8, 96e9)
    assert other.across.bandwidth == pytest.approx(LINK_SHARE * 1e9)
    assert other.within == Links(0.0, LINK_SHARE * 63e9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h1000"}, "device='h1000' is not known; known: a40, a100"),
        ({"network": "ib"}, "network='ib' is not known; known: nvlink3"),
        ({"within": "ib"}, "within='ib' is not known"),
        ({"memroy": 1.0}, "no field 'memroy'; did you mean memory?"),
        ({"ranks_per_nod": 4}, "no field 'ranks_per_nod'; did you mean ranks_per_node?"),
        ({"xyz": 4}, "the fields are device, nodes, ranks_per_node, network, within, cores_per_node, flops, memory"),
        ({"cores_per_node": 0}, "cores_per_node=0 must be positive"),
        ({"nodes": 0}, "nodes=0 must be positive"),
        ({"nodes": "two"}, "nodes=two must be positive"),
        ({"nodes": 1.5}, "nodes=1.5 must be positive and whole"),
        ({"across_bandwidth": -1.0}, "across_bandwidth=-1.0 must be positive"),
        ({"matmul": 60.0}, "matmul=60.0 is a share of flops"),
    ],
)
def test_what_is_not_known_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cluster(**({"device": "h100", "nodes": 1} | arguments))  # type: ignore[arg-type]
    assert message in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_configurations_make_clusters(name: str) -> None:
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        config = hydra.compose(f"cluster/{name}", overrides=["cluster.nodes=4"])
    found = instantiate(config.cluster)
    assert isinstance(found, Cluster) and found.nodes == 4


def test_configurations_say_what_papers_say() -> None:
    """DistTrain: 300 GB/s of NVLink both ways, 4 x 200 Gb/s for 8 GPUs."""
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        found = instantiate(hydra.compose("cluster/disttrain").cluster)
    assert found.within.bandwidth == pytest.approx(LINK_SHARE * 150e9)
    assert found.across.bandwidth == pytest.approx(LINK_SHARE * 4 * 200e9 / 8 / 8)
    assert found.ranks == 1296


PLAIN = Cluster(DEVICES["h100"], 4, 8, Links(1e-6, 100e9), Links(2e-6, 10e9))


@pytest.mark.parametrize(
    ("ranks", "stride", "latency", "bandwidth"),
    [
        (8, 1, 1e-6, 100e9),  # a node
        (2, 4, 1e-6, 100e9),  # two ranks of a node
        (32, 1, 2e-6, 80e9),  # eight adapters of each node
        (16, 2, 2e-6, 40e9),  # four of them
        (4, 8, 2e-6, 10e9),  # one
    ],
)
def test_a_ring_takes_what_its_slowest_links_take(ranks: int, stride: int, latency: float, bandwidth: float) -> None:
    size = 1e9
    expected = latency * ceil(log2(ranks)) + size * (ranks - 1) / ranks / bandwidth
    assert PLAIN.collective(size, ranks, stride) == pytest.approx(expected)


def test_links_within_a_node_bound_a_ring_across_nodes() -> None:
    slow = replace(PLAIN, within=Links(1e-6, 20e9))
    assert slow.collective(1e9, 32) == pytest.approx(2e-6 * 5 + 1e9 * 31 / 32 / 20e9)


def test_collectives_are_free_alone_linear_in_bytes_and_never_slower_on_faster_links() -> None:
    assert PLAIN.collective(1e9, 1) == 0.0
    none, one, three = (PLAIN.collective(size, 32) for size in (0.0, 1e6, 3e6))
    assert three - none == pytest.approx(3 * (one - none))
    faster = replace(PLAIN, across=Links(2e-6, 20e9))
    for ranks, stride in ((2, 1), (8, 1), (32, 1), (16, 2), (4, 8)):
        assert faster.collective(1e8, ranks, stride) <= PLAIN.collective(1e8, ranks, stride)
    assert faster.collective(1e8, 4, 8) < PLAIN.collective(1e8, 4, 8)


def test_the_page_on_plans_has_all_fields_and_names_and_its_clusters_can_be_made() -> None:
    page = (CONF.parent / "docs" / "planning.md").read_text()
    section = page.split("## Your own cluster")[1].split("\n## ")[0]
    made = [instantiate(OmegaConf.create(text)) for text in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]
    assert [str(one) for one in made] == ["16 x a100"]
    assert all(f"`{name}`" in section for name in (*_FIELDS, *DEVICES, *LINKS))
