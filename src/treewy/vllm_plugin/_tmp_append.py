import torch
def append_layers(kept, places, step, path, backend=None):
    lens=kept.lengths
    for b,(p,n) in enumerate(zip(places.tolist(), path.lengths.tolist())):
        if p<0 or n==0: continue
        L=int(lens[p]); rows=path.rows[b,:n].long()
        new=(step.decay_high[:,rows].double()+step.decay_low[:,rows].double())
        if L: new=new+(kept.decay_high[:,p,L-1].double()+kept.decay_low[:,p,L-1].double())[:,None]
        kept.u[:,p,L:L+n]=step.u[:,rows]; kept.k[:,p,L:L+n]=step.k[:,rows]
        kept.decay_high[:,p,L:L+n]=new.float(); kept.decay_low[:,p,L:L+n]=(new-new.float().double()).float()
        lens[p]=L+n
