"""Loads FOLDER/trained.pt into the model in eager mode, makes one step, and writes FOLDER/trained_on.pt.

    train_on.py NAME FOLDER
"""

import os
import sys

import torch

import models

name, folder = sys.argv[1:]
module, inputs, loss = getattr(models, "make_" + name)()
module.load_state_dict(torch.load(os.path.join(folder, "trained.pt"), weights_only=True))
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
loss(module(*inputs[:-1]), inputs[-1]).backward()
optimizer.step()
torch.save(module.state_dict(), os.path.join(folder, "trained_on.pt"))
