"""`tf.distribute.MultiWorkerMirroredStrategy()` in a training function gives the run's strategy."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def returned_by_its_class(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Iterator[None]:
    """Let every call of the strategy's class return the strategy.

    Scripts make a strategy of their own from TF_CONFIG. A second one would start a second server
    at the address of the first.
    """
    cls = tf.distribute.MultiWorkerMirroredStrategy
    own_init = cls.__init__

    def new(*_: Any, **__: Any) -> Any:
        return strategy

    @functools.wraps(own_init)
    def init(self: Any, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        if communication_options is not None:
            logger.warning(
                "communication_options of MultiWorkerMirroredStrategy aren't used: it returns the "
                "strategy of the run, which is there already. make_trainer(…, timeout_s=…) sets "
                "the limit of its collective operations."
            )

    cls.__new__ = new
    cls.__init__ = init
    try:
        yield
    finally:
        cls.__init__ = own_init
        # Once it was set, a deleted __new__ would no longer ignore the arguments of __init__.
        cls.__new__ = lambda made, *_, **__: object.__new__(made)


@contextlib.contextmanager
def made_without_cluster() -> Iterator[None]:
    """Let strategies of one worker start no server, although TF_CONFIG names its address.

    A server would stay in the process, and a second run there would need its own.
    """
    cls = tf.distribute.MultiWorkerMirroredStrategy
    own_init = cls.__init__

    @functools.wraps(own_init)
    def init(self: Any, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        resolver = tf.distribute.cluster_resolver
        alone = resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        own_init(self, alone, communication_options)

    cls.__init__ = init
    try:
        yield
    finally:
        cls.__init__ = own_init
