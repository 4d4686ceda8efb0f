import os
import signal

import pytest

from digen_jax.interrupt import Interrupt


def test_the_first_interrupt_is_noted_and_the_second_ends():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
