"""Contents simulation of a manager with a host tier."""
import sys; sys.path.insert(0,'tests')
import logging; logging.disable(logging.CRITICAL)
from random import Random
import numpy as np
from hybrids import *
from pagepool import *
from pagepool.manager.tiers import HostTier
from pagepool import SlidingWindowSpec
W=SlidingWindowSpec(4,1,8,"float16",False,9)
def run_one(seed, calls=400):
    rng=Random(seed)
    specs=rng.choice([(FULL,),(FULL,W),(FULL,STATE),(STATE,),(W,)])
    states=[s is STATE for s in specs]
    N=rng.choice([14,24,40]); H=rng.choice([6,30,100])
    m=make_manager(*specs,num_pages=N,host_tier=HostTier(H,policy=rng.choice(['write_back','write_through']),min_uses=rng.choice([1,1,2]),eviction=rng.choice(['lru','adaptive'])),eviction=rng.choice(['lru','arc','adaptive']))
    psz=4
    dev=[dict() for _ in range(N)]   # page -> slot->content key ; state: {'s':prefix}
    host=[dict() for _ in range(H)]
    fams=[[rng.randint(0,2) for _ in range(60)] for _ in range(3)]
    running={}; inflight=[]; n=0; stat=dict(hit=0,loads=0,saves=0,fails=0)
    def do_transfers():
        t=m.take_transfers()
        if len(t):
            bufs=[dict(dev[s]) for s in t.save_src]
            lbufs=[dict(host[s]) for s in t.load_src]
            for d,b in zip(t.load_dst,lbufs): dev[d]=b
            inflight.append((t,bufs)); stat['loads']+=len(t.load_src); stat['saves']+=len(t.save_src)
        c=m.take_copies()
        bufs=[dict(dev[s]) for s in c.src]
        for d,b in zip(c.dst,bufs): dev[d]=b
    def complete():
        if inflight:
            t,bufs=inflight.pop(rng.randrange(len(inflight)))
            for d,b in zip(t.save_dst,bufs): host[d]=b
            m.complete_transfers(t.number)
    def check_read(r,upto):
        toks=tuple(r.all_token_ids); ids=m.get_page_ids(r.request_id)
        for g,s in enumerate(specs):
            if states[g]:
                if upto: assert dev[ids[g][0]].get('s')==toks[:upto],(seed,'state',r.request_id,upto,dev[ids[g][0]])
                continue
            lo=0 if s is FULL else max(0,upto-9+1)
            for p in range(lo,upto):
                pg=ids[g][p//psz]
                assert pg!=0 and dev[pg].get(p%psz)==(toks[:p+1]),(seed,r.request_id,g,p,pg,dev[pg].get(p%psz),toks[:p+1])
    def write(r,a,b):
        toks=tuple(r.all_token_ids); ids=m.get_page_ids(r.request_id)
        for g,s in enumerate(specs):
            if states[g]: dev[ids[g][0]]={'s':toks[:b]}; continue
            for p in range(a,b):
                pg=ids[g][p//psz]
                if p%psz==0: dev[pg]={}
                dev[pg][p%psz]=toks[:p+1]
    i=0
    for n in range(calls):
        act=rng.random()
        sched=[]
        # schedule a round
        for r in list(running.values()):
            if rng.random()<0.15:
                m.free(r); m.free_page_hashes(r); del running[r.request_id]; continue
            if r.num_tokens>=60: 
                m.free(r); m.free_page_hashes(r); del running[r.request_id]; continue
            if r.num_computed_tokens==r.num_tokens: r.all_token_ids.append(rng.randint(0,2))
            left=r.num_tokens-r.num_computed_tokens
            k=rng.randint(1,left)
            if rng.random()<0.5 and m.checkpoint_interval: k=min(left,m.find_next_checkpoint(r)-r.num_computed_tokens)
            if m.allocate_slots(r,k) is None:
                m.free(r); m.free_page_hashes(r); del running[r.request_id]
            else: sched.append((r,r.num_computed_tokens,r.num_computed_tokens+k))
        if len(running)<3 and rng.random()<0.6:
            i+=1; f=rng.choice(fams); L=rng.randint(1,50)
            r=EngineRequest(f'r{i}',f[:L]+[rng.randint(0,2) for _ in range(rng.randint(0,3))])
            if r.num_tokens:
                hits,nh=m.get_computed_pages(r)
                k=rng.randint(1,r.num_tokens-nh)
                if m.allocate_slots(r,k,nh,hits) is not None:
                    stat['hit']+=nh; r.num_computed_tokens=nh; running[r.request_id]=r; sched.append((r,nh,nh+k))
                else: m.free_page_hashes(r)
        m.check()
        do_transfers()
        for r,a,b in sched:
            check_read(r,a); write(r,a,b); r.num_computed_tokens=b

        while inflight and (len(inflight)>3 or rng.random()<0.5): complete()
        if rng.random()<0.02 and not running and not inflight: assert m.reset_prefix_cache() 
    return stat
if __name__=='__main__':
    tot={}
    for s in range(int(sys.argv[1]),int(sys.argv[2])):
        st=run_one(s)
        for k,v in st.items(): tot[k]=tot.get(k,0)+v
    print(tot)
