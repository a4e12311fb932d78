"""A loader of DLIO that notes which samples its rank gets in each epoch."""

import json
import os
from pathlib import Path

from dlio_loader import Loader


class Recorded(Loader):
    def next(self):
        notes = Path(os.environ["NOTES"], f"{self._epoch}-{self._args.my_rank}.json")
        seen = []
        for batch in super().next():
            seen += batch["label"].tolist()
            notes.write_text(json.dumps(seen))
            yield batch
