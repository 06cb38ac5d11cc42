"""Which collectives have compute beside them, read from a scheduled program."""

from meshpar.contracts import parse_hlo

MESH = {"data": 2, "fsdp": 2, "tensor": 2}

SCHEDULED = """
%start (p: bf16[4,8]) -> (bf16[4,8], bf16[32,8]) {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.1 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %c = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) custom-call(%g.1)
}
%middle (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.2 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %d = bf16[4,8]{1,0} dot(%p, %p)
}
%done (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.3 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %c = bf16[32,8]{1,0} custom-call(%g.3)
}
ENTRY %main (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %a = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) fusion(%p), kind=kCustom, calls=%start
  %b = bf16[4,8]{1,0} fusion(%p), kind=kOutput, calls=%middle
  %e = bf16[32,8]{1,0} fusion(%b), kind=kCustom, calls=%done
  %q = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%b), \
source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
  %f = bf16[4,8]{1,0} dot(%b, %b)
  %r = bf16[4,8]{1,0} collective-permute-done(%q)
  ROOT %s = bf16[4,8]{1,0} all-reduce(%r), replica_groups={}
}
"""


def test_fragments_of_a_chain_count_once_and_overlap_is_detected():
    gather, permute, reduction = parse_hlo(SCHEDULED, MESH)
    assert gather.kind == "all_gather" and gather.payload_bytes == 32 * 8 * 2
    assert gather.asynchronous and gather.overlapped
    assert permute.overlapped and not reduction.overlapped
    for busy in ("dot(%b, %b)", "fusion(%p), kind=kOutput, calls=%middle"):
        idle = SCHEDULED.replace(busy, "copy(%p)")
        overlapped = [collective.overlapped for collective in parse_hlo(idle, MESH)]
        assert overlapped.count(True) == 1
