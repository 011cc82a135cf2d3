"""A torchvision model, data parallel, as in torchvision's reference scripts.

vision.py vit_b_16|resnet50|vgg16
"""

import os
import sys

import torch
import torch.distributed as dist
import torchvision
from stopwatch import STEPS, pick, stamp
from torch.nn.parallel import DistributedDataParallel


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
        if cuda
        else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    size = 224 if cuda or sys.argv[1] == "vit_b_16" else 64
    model = torchvision.models.get_model(sys.argv[1], weights=None, num_classes=1000).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    batch = pick(64, 1)
    images = torch.randn(4, batch, 3, size, size)
    labels = torch.randint(1000, (4, batch))
    model.train()
    for step in range(STEPS):
        image, target = images[step % 4].to(device, non_blocking=True), labels[step % 4].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item(), flush=True)
        stamp()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
