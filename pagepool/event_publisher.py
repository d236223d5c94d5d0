"""The former name of `pagepool.events.publisher`."""

from pagepool.events.publisher import EventPublisher

__all__ = ["EventPublisher"]
