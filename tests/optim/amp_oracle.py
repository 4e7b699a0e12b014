"""Python's GradScaler on a CPU, which PyTorch 2.3 and later have:

  amp_oracle.py STEPS     prints, for each step, the scale before it, the growth tracker, and the parameters after it
"""
import sys

import torch

STEPS = int(sys.argv[1])
weight = torch.linspace(-1, 1, 6, dtype=torch.float32).requires_grad_()
optimizer = torch.optim.AdamW([weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=4)
for step in range(STEPS):
    optimizer.zero_grad()
    factor = float("inf") if step % 7 == 3 else float("nan") if step % 11 == 8 else 1.0 + step
    scaler.scale((weight * weight * factor).sum()).backward()
    if step % 2 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    print(scale, state["_growth_tracker"], *weight.detach().double().tolist())
