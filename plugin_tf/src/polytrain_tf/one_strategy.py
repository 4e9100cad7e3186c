"""Makes `MultiWorkerMirroredStrategy()` in a training function return the run's strategy."""

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
    """Let every call of the strategy's class return this strategy.

    Scripts create their own strategy from TF_CONFIG. A second strategy would start a second server
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
        # Don't delete __new__: once it was set, the default would refuse __init__'s arguments.
        cls.__new__ = lambda made, *_, **__: object.__new__(made)


@contextlib.contextmanager
def made_without_cluster() -> Iterator[None]:
    """Keep strategies of one worker from starting a server, although TF_CONFIG has its address.

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
