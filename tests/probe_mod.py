import torch.distributed as dist
from tests.cases import open_engine
from weft.objectives.cross_entropy import CrossEntropy
from weft.verification.documents import awkward_steps
from weft.verification.harness import to_documents
def counts(path, mesh, reduce):
    e = open_engine(path, mesh, fsdp={"reduce": reduce}, step={"max_tokens_per_device": 61})
    log = []
    def wrap(name):
        o = getattr(dist, name)
        def f(*a, **k):
            log.append((name, dist.get_world_size(k.get("group"))))
            return o(*a, **k)
        setattr(dist, name, f)
        return o
    old = {n: wrap(n) for n in ("all_reduce", "reduce_scatter_single", "all_gather_single")}
    class O(CrossEntropy):
        def __call__(self, b):
            log.append("micro"); return super().__call__(b)
    docs, metas = to_documents(e, awkward_steps(128)[0])
    plan = e.plan(metas)
    e.accumulate(plan, docs, O())
    for n, o in old.items(): setattr(dist, n, o)
    return plan.micro_batches, [u.name for u in e.units], log
