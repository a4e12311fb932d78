"""Calls whose options mypy checks, as it does in a user's program: `ignore` names what it sees."""

import dsprep


def options_have_types() -> None:
    dsprep.convert("a.h5", "b.zarr", shard_size="1GiB", cast={"x": "f2"}, memory="1GiB", workers=2)
    dsprep.convert("a.h5", "b.zarr", workers="two")  # type: ignore[arg-type]
    dsprep.convert("a.h5", "b.zarr", shards=2)  # type: ignore[call-arg]
    dsprep.repack("a.h5", "b.h5", buffer_size=8, split="a=1", executor=None, measure=True)
    dsprep.repack("a.h5", "b.h5", duplicate="twice")  # type: ignore[arg-type]
    dsprep.write("a.h5", [], length=3, compress="zstd", shuffle=1)
    dsprep.write("a.h5", [], split="a=1")  # type: ignore[call-arg]
    dsprep.audit("a.h5", 2, 8, shuffle="global", remainder="pad", mini_epochs=4, seed=1)
    dsprep.audit("a.h5", 2, 8, shuffle="all")  # type: ignore[arg-type]
    dsprep.stage("a.h5", 2, 8, "cache", ranks_per_node=1, fields=("x",), pools=2)
    dsprep.stage("a.h5", 2, 8, "cache", ranks_per_node=1, sead=2)  # type: ignore[call-arg]
    dsprep.Reader("a.h5", 8, shuffle="none", epochs=None, seed=1)
    dsprep.Reader("a.h5", 8, epochs="all")  # type: ignore[arg-type]
