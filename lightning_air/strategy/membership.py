"""Who this process is among the ranks, and where they meet."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who this process is in the group, and where the group meets.

    Attributes:
        global_rank: This rank.
        world_size: How many ranks there are.
        ranks_per_node: How many of them share a node; rank r is on node r // ranks_per_node.
        address: Where rank 0 listens, or the launcher's agent.
        port: Its port.
        agent_hosts_store: torchrun's agent listens there already.
        attempt: Which restart of the group this is, counted by the launcher.
        plan: What all ranks have to agree on besides their number, such as "sharding='fsdp'".
    """

    global_rank: int
    world_size: int
    ranks_per_node: int
    address: str
    port: int
    agent_hosts_store: bool = False
    attempt: int = 0
    plan: str = ""

    def describe(self, rank: int) -> str:
        """Return "rank 9 (node 1, local rank 1)"."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        return f"rank {rank} (node {node}, local rank {local_rank})"

    @property
    def host(self) -> str:
        """Who listens at the address."""
        return "the launcher's agent" if self.agent_hosts_store else self.describe(0)

    @property
    def where(self) -> str:
        """The address and the port."""
        return f"{self.address}:{self.port}"
