"""The policy keeps featstore's contract for online policies."""

from featstore_plugin_example import LFU

from featstore.testing import OnlinePolicyContract


class TestLFU(OnlinePolicyContract):
    registered_name = "lfu"  # through the entry point of the installed package

    def make(self) -> LFU:
        return LFU()
