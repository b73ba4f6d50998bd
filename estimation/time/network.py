"""Seconds of a collective: latency per step and bytes over bandwidth, by the size and the place of its group."""

from dataclasses import dataclass

from estimation.devices import Device

# Seconds; NCCL, src/graph/tuning.cc: the ring's Simple protocol.
BASE, LINK_STEP, NETWORK_STEP = 8.4e-6, 3.4e-6, 14e-6
CHANNELS = 24  # multiprocessors that a collective takes: "24 coll channels" of NCCL's log on 8 A100 or H100


@dataclass(frozen=True)
class Group:
    """Ranks of one mesh axis: `size` of them, each `stride` ranks from the next."""

    size: int
    stride: int

    def in_node(self, node: int) -> int:
        """Members that share a node with a rank."""
        return min(self.size, max(1, node // self.stride))


@dataclass(frozen=True)
class Network:
    device: Device

    def bandwidth(self, group: Group) -> float:
        """Bytes per second into each rank of a ring: within a node its link; between nodes also what the members of a
        node have of network adapters together, one adapter per device."""
        device, local = self.device, group.in_node(self.device.node)
        link = device.link_gb_s * 1e9 if local > 1 else float("inf")
        network = local * device.network_gb_s * 1e9 if local < group.size else float("inf")
        return min(link, network) * device.link_share

    def gather(self, size: float, group: Group) -> float:
        """An all-gather to, or a reduce-scatter of, `size` bytes (the whole)."""
        if group.size == 1 or not size:
            return 0.0
        nodes = -(-group.size // group.in_node(self.device.node))
        latency = BASE + (group.size - nodes) * LINK_STEP + (nodes - 1) * NETWORK_STEP
        return latency + size * (group.size - 1) / group.size / self.bandwidth(group)

    def all_reduce(self, size: float, group: Group) -> float:
        return 2 * self.gather(size, group)

    def send(self, size: float, stride: int) -> float:
        """To a rank `stride` further."""
        device = self.device
        is_near = stride < device.node
        rate = device.link_gb_s if is_near else device.network_gb_s
        return BASE + (LINK_STEP if is_near else NETWORK_STEP) + size / (rate * 1e9 * device.link_share)

    @property
    def crowding(self) -> float:
        """Share of the multiprocessors that compute misses while a collective runs beside it."""
        return min(0.5, CHANNELS / self.device.units)
