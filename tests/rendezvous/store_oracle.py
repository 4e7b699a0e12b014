"""What PyTorch's own TCPStore answers.

Each argument is a call: its name, then words that are keys and values. Writes one line per multi_get: "= ", then the
values, separated by spaces, or "timed out".
"""
import sys
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
for call in sys.argv[1:]:
    name, *words = call.split()
    if name == "multi_set":
        store.multi_set(words[::2], words[1::2])
    elif name == "multi_get":
        store.set_timeout(timedelta(milliseconds=100))
        try:
            print("=", *(value.decode() for value in store.multi_get(words)))
        except DistStoreError:
            print("= timed out")
    else:
        getattr(store, name)(*words)
