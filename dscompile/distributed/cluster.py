"""Clusters as data: which GPUs, how many, how they are linked. Built-in ones, and those of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dscompile.targets import TARGETS, Constant, Target, get_target


class ClusterError(ValueError):
    """A cluster that cannot be used; the message names the field, the value and what is allowed."""


@dataclass(frozen=True)
class Cluster:
    """target: of every GPU. gpus: in all; domain: those that share one fast link (NVLink).

    link_bytes_per_s: of one GPU inside its domain, one direction. network_bytes_per_s: of one GPU to other domains.
    """

    name: str
    target: Target
    gpus: int
    domain: int
    link_bytes_per_s: Constant
    network_bytes_per_s: Constant

    def __post_init__(self) -> None:
        for field, value in (("gpus", self.gpus), ("domain", self.domain)):
            if type(value) is not int or value < 1:
                raise ClusterError(f"{self.name}: {field} is {value!r}, allowed: a whole number >= 1")
        if self.gpus > self.domain and self.gpus % self.domain:
            raise ClusterError(f"{self.name}: gpus is {self.gpus}, allowed: a multiple of domain {self.domain}")
        if not self.link_bytes_per_s.value:
            raise ClusterError(f"{self.name}: link_bytes_per_s is unknown, allowed: a number > 0")

    def rate(self, ranks: int) -> tuple[float, str]:
        """Bytes per second of one GPU, one direction, for an exchange among `ranks` of them, and over what.

        Within a domain its link. Beyond, what leaves the domain waits for the network: the slower of the two for the
        share that each carries (destinations are even).

        Raises:
            ClusterError: more ranks than GPUs, or no network for ranks of several domains.
        """
        if not 1 <= ranks <= self.gpus:
            raise ClusterError(f"{ranks} ranks on {self.name}, allowed: 1 to {self.gpus}")
        assert self.link_bytes_per_s.value
        if ranks <= self.domain:
            return self.link_bytes_per_s.value, "link"
        if not self.network_bytes_per_s.value:
            raise ClusterError(
                f"{self.name}: network_bytes_per_s is unknown, needed for {ranks} ranks, over {self.domain}"
            )
        outside = (ranks - self.domain) / (ranks - 1)
        rates = {
            "network": self.network_bytes_per_s.value / outside, "link": self.link_bytes_per_s.value / (1 - outside),
        }  # fmt: skip
        slowest = min(rates, key=lambda name: rates[name])
        return rates[slowest], slowest


def _of(target: str, name: str, gpus: int, network: float | None) -> Cluster:
    machine = get_target(target)
    domain = int(machine.link_domain_devices.value or 1)
    there = (
        Constant(network, "unconfirmed", "one adapter of 400 Gbit/s a GPU")
        if network
        else Constant(None, "unknown", "")
    )
    return Cluster(name, machine, gpus, domain, machine.link_bytes_per_s, there)


CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {cluster.name: cluster for cluster in (_of("sm_103a", "gb300-nvl72", 72, None), _of("sm_90a", "hgx-h200", 8, 50e9))}
)

_NEEDED = ("target", "gpus")
_ALLOWED = (*_NEEDED, "name", "domain", "link_bytes_per_s", "network_bytes_per_s")


def read_cluster(name: str) -> Cluster:
    """A key of `CLUSTERS`, or a path to a YAML file with target, gpus and, if it differs from the target's, domain,
    link_bytes_per_s, network_bytes_per_s.

    Raises:
        ClusterError: no such cluster or file; a field that is missing, unknown or of another type.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    path = Path(name)
    if not path.is_file():
        raise ClusterError(f"cluster {name!r} is no file; allowed: {', '.join(CLUSTERS)}, or a YAML file")
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ClusterError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    return _from_file(path, content)


def _from_file(path: Path, content: Any) -> Cluster:
    if not isinstance(content, dict):
        raise ClusterError(f"{path} holds {type(content).__name__}, allowed: a mapping with {', '.join(_ALLOWED)}")
    for key in content:
        if key not in _ALLOWED:
            raise ClusterError(f"{path}: unknown field {key!r}, allowed: {', '.join(_ALLOWED)}")
    for key in _NEEDED:
        if key not in content:
            raise ClusterError(f"{path}: {key} is missing")
    if content["target"] not in TARGETS:
        raise ClusterError(f"{path}: target is {content['target']!r}, allowed: {', '.join(TARGETS)}")
    machine = get_target(content["target"])

    def rate(key: str, default: Constant) -> Constant:
        if key not in content:
            return default
        value = content[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ClusterError(f"{path}: {key} is {value!r}, allowed: a number > 0 (bytes per second, one direction)")
        return Constant(float(value), "unconfirmed", str(path))

    return Cluster(
        str(content.get("name", path.stem)), machine, content["gpus"],
        content.get("domain", int(machine.link_domain_devices.value or 1)),
        rate("link_bytes_per_s", machine.link_bytes_per_s),
        rate("network_bytes_per_s", Constant(None, "unknown", "not in the file")),
    )  # fmt: skip
