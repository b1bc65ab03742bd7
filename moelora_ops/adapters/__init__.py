"""From adapters on disk to slots of a pool: readers, the canonical form, the pool."""

from .adapter import LoraAdapter, ProjectionLora
from .geometry import MoeGeometry
from .loading import load_adapter
from .pool import LoraPool, PoolLayer

__all__ = ["LoraAdapter", "LoraPool", "MoeGeometry", "PoolLayer", "ProjectionLora", "load_adapter"]
