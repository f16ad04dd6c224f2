"""Images: decoding, augmentation by torchvision, albumentations and timm, collators and models."""

from __future__ import annotations

import io

import albumentations
import numpy as np
import pyarrow as pa
import pytest
import timm
import torch
from PIL import Image
from timm.data.loader import fast_collate
from timm.data.mixup import FastCollateMixup, Mixup
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

from dataload import fit, make_dataset, make_loader

ROWS = 32


def jpeg(number, size=(24, 20)):
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "jpeg")
    return sink.getvalue()


@pytest.fixture
def photos(write, cache):
    sizes = [(20 + row % 5, 24) for row in range(ROWS)]
    columns = {"image": [jpeg(row, size) for row, size in enumerate(sizes)], "label": np.arange(ROWS) % 4}
    return make_dataset(write(columns), cache=cache)


def pixels_of(data):
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


def decode(batch):
    """Decode once: every image as a tensor [3, 16, 16]."""
    images = [v2.functional.resize(pixels_of(data), [16, 16]) for data in batch["image"]]
    return {"image": torch.stack(images), "label": batch["label"]}


@pytest.fixture
def images(photos):
    return photos.map(decode)


def runs_alike(make):
    """Return the first tensors of two epochs, which must be equal for threads, the loop, and workers."""
    found = []
    for options in ({}, {"num_threads": 0}, {"num_workers": 2}, {}):
        loader = make(**options)
        found.append([batch["image"].clone() for _ in range(2) for batch in loader])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    return found[0]


augment = v2.Compose(
    [
        v2.RandomResizedCrop(16, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.3),
        v2.ToDtype(torch.float32),
    ]
)


def augmented(batch):
    return {"image": torch.stack([augment(pixels_of(data)) for data in batch["image"]]), "label": batch["label"]}


def test_decode_and_augment_with_torchvision(photos):
    """JPEG to tensors by torchvision v2 in a transform: the same batches in threads, the loop and workers."""
    found = runs_alike(lambda **options: make_loader(photos, 8, transform=augmented, **options))
    assert not torch.equal(found[0], found[4])


def test_dropout_is_the_same_beside_random_transforms(photos):
    """Two runs with torchvision's draws in threads and dropout in the loop have the same losses."""

    def losses():
        torch.manual_seed(0)
        layers = torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(768, 4)
        model = torch.nn.Sequential(*layers)

        def loss(model, batch):
            return torch.nn.functional.cross_entropy(model(batch["image"] / 255), batch["label"])

        loader = make_loader(photos, 8, transform=augmented)
        return fit(model, torch.optim.SGD(model.parameters(), 0.01), loader, loss, epochs=2, progress=False)

    assert [record["loss"] for record in losses()] == [record["loss"] for record in losses()]


detect = v2.Compose([v2.RandomHorizontalFlip(), v2.Resize((16, 16)), v2.SanitizeBoundingBoxes()])


def with_boxes(batch):
    found = []
    for data, boxes, labels in zip(batch["image"], batch["boxes"], batch["labels"], strict=True):
        image = tv_tensors.Image(pixels_of(data))
        corners = torch.as_tensor(boxes).reshape(-1, 4).float()
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=image.shape[-2:])
        found.append(detect({"image": image, "boxes": boxes, "labels": torch.as_tensor(labels)}))
    boxes = [each["boxes"].as_subclass(torch.Tensor) for each in found]
    images = torch.stack([each["image"].as_subclass(torch.Tensor) for each in found])
    return {"image": images, "boxes": boxes, "labels": [each["labels"] for each in found]}


def test_detection_with_torchvision(write, cache):
    """Boxes of any number for each image, flipped and resized with it."""
    boxes = [[[1.0, 1.0, 10.0, 12.0], [4.0, 4.0, 20.0, 18.0]][: row % 3] for row in range(ROWS)]
    pairs = pa.array(boxes, pa.list_(pa.list_(pa.float32(), 4)))
    labels = [list(range(row % 3)) for row in range(ROWS)]
    columns = {"image": [jpeg(row) for row in range(ROWS)], "boxes": pairs, "labels": labels}
    rows = make_dataset(write(columns), cache=cache)
    assert rows.__getitems__([2]).columns["boxes"][0].shape == (2, 4)
    batches = [*make_loader(rows, 8, transform=with_boxes, shuffle=False)]
    assert [len(each) for batch in batches for each in batch["boxes"]] == [row % 3 for row in range(ROWS)]
    runs_alike(lambda **options: make_loader(rows, 8, transform=with_boxes, **options))


mixed = v2.RandomChoice([v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)])


def mix(batch):
    image, label = mixed(batch["image"].float(), batch["label"])
    return {"image": image, "label": label}


def test_mixup_of_torchvision(images):
    """MixUp and CutMix of torchvision over whole batches in a transform."""
    found = runs_alike(lambda **options: make_loader(images, 8, transform=mix, **options))
    assert found[0].shape == (8, 3, 16, 16)


def train_with_timm(loader, epochs=1):
    model = timm.create_model("resnet10t", num_classes=4, pretrained=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = 0
    for _ in range(epochs):
        for image, target in loader:
            loss = torch.nn.functional.cross_entropy(model(image.float() / 255), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(image)
    return rows


def test_timm_with_mixup_in_the_collator(images):
    """FastCollateMixup as it is, and a timm model."""
    collate = FastCollateMixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=4)
    loader = make_loader(images, 8, collate_fn=collate)
    image, target = next(iter(loader))
    assert image.dtype == torch.uint8
    assert target.shape == (8, 4)
    assert train_with_timm(loader) == ROWS


def test_timm_with_fast_collate(images):
    """The fast_collate of timm as it is."""
    assert train_with_timm(make_loader(images, 8, collate_fn=fast_collate)) == ROWS


@pytest.mark.limit("timm takes pairs: `lambda rows: fast_collate([tuple(row.values()) for row in rows])`")
def test_timm_in_a_dataloader(images):
    """In torch's DataLoader over our dataset, timm's fast_collate gets dicts, so it needs pairs."""
    with pytest.raises(AssertionError):
        next(iter(DataLoader(images, 8, collate_fn=fast_collate)))
    pairs = DataLoader(images, 8, collate_fn=lambda rows: fast_collate([tuple(row.values()) for row in rows]))
    assert train_with_timm(pairs) == ROWS


def test_timm_with_mixup_in_the_loop(images):
    """The Mixup of timm for whole batches in the loop."""
    mixup = Mixup(mixup_alpha=0.2, num_classes=4)
    image, target = mixup(*((batch := next(iter(make_loader(images, 8))))["image"].float(), batch["label"]))
    assert image.shape[0] == target.shape[0] == 8


def test_timm_transforms(photos):
    """The augmentation that timm makes for a model, in workers."""
    made = timm.data.create_transform((3, 16, 16), is_training=True)

    def transform(batch):
        images = [made(Image.open(io.BytesIO(data)).convert("RGB")) for data in batch["image"]]
        return {"image": torch.stack(images), "label": batch["label"]}

    loader = make_loader(photos, 8, transform=transform, num_workers=2)
    assert sum(len(batch["image"]) for batch in loader) == ROWS


def test_segmentation_with_albumentations(write, cache):
    """Image and mask crop and flip together; seeded by `rng`, the same in threads, the loop and workers."""
    masks = [Image.fromarray(np.full((24, 20), row % 2, np.uint8)) for row in range(ROWS)]
    encoded = []
    for mask in masks:
        sink = io.BytesIO()
        mask.save(sink, "png")
        encoded.append(sink.getvalue())
    rows = make_dataset(write({"image": [jpeg(row) for row in range(ROWS)], "mask": encoded}), cache=cache)

    def transform(batch, rng):
        crop = albumentations.Compose(
            [albumentations.RandomCrop(16, 16), albumentations.HorizontalFlip(p=0.5)], seed=int(rng.integers(2**31))
        )
        pairs = [
            crop(
                image=np.array(Image.open(io.BytesIO(image)).convert("RGB")),
                mask=np.array(Image.open(io.BytesIO(mask))),
            )
            for image, mask in zip(batch["image"], batch["mask"], strict=True)
        ]
        return {name: torch.from_numpy(np.stack([pair[name] for pair in pairs])) for name in ("image", "mask")}

    found = runs_alike(lambda **options: make_loader(rows, 8, transform=transform, **options))
    assert found[0].shape == (8, 16, 16, 3)


shared = albumentations.Compose([albumentations.RandomCrop(16, 16), albumentations.RandomBrightnessContrast(p=1)])


def by_albumentations(batch):
    pictures = [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in batch["image"]]
    return {"image": torch.from_numpy(np.stack([shared(image=each)["image"] for each in pictures]))}


def test_albumentations_without_a_seed(photos):
    """A pipeline of the module without a seed draws the same in each run, in threads, the loop and workers."""
    runs_alike(lambda **options: make_loader(photos, 8, transform=by_albumentations, **options))


def test_detection_with_albumentations(write, cache):
    """Boxes and their labels follow the image through albumentations."""
    boxes = pa.array(
        [[[1.0, 1.0, 10.0, 12.0]] * (1 + row % 2) for row in range(ROWS)], pa.list_(pa.list_(pa.float32(), 4))
    )
    rows = make_dataset(write({"image": [jpeg(row) for row in range(ROWS)], "boxes": boxes}), cache=cache)

    def transform(batch, rng):
        flip = albumentations.Compose(
            [albumentations.HorizontalFlip(p=1)],
            bbox_params=albumentations.BboxParams("pascal_voc", label_fields=["labels"]),
            seed=int(rng.integers(2**31)),
        )
        found = [
            flip(
                image=np.array(Image.open(io.BytesIO(data)).convert("RGB")),
                bboxes=np.asarray(boxes).reshape(-1, 4),
                labels=[0] * len(boxes),
            )
            for data, boxes in zip(batch["image"], batch["boxes"], strict=True)
        ]
        return {"image": np.stack([each["image"] for each in found]), "boxes": [each["bboxes"] for each in found]}

    batch = next(iter(make_loader(rows, 8, transform=transform, shuffle=False)))
    assert np.allclose(batch["boxes"][0], [[10, 1, 19, 12]])


def test_image_processor_of_transformers(photos):
    """A processor of transformers in `map`, which names its version, and a ViT."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 16, "width": 16})

    def process(batch):
        pictures = [pixels_of(data) for data in batch["image"]]
        return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"], "labels": batch["label"]}

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**small, image_size=16, patch_size=8, num_labels=4))
    loader = make_loader(photos.map(process, version="16 x 16 pixels"), 8)

    def loss(model, batch):
        return model(**batch).loss

    history = fit(model, torch.optim.Adam(model.parameters(), 1e-2), loader, loss, epochs=5, progress=False)
    assert history[-1]["loss"] < history[0]["loss"]


def test_images_of_varying_size(photos):
    """`map` decodes images of varying size; a collator makes a list of them."""

    def decoded(batch):
        return {"image": [pixels_of(data) for data in batch["image"]], "label": batch["label"]}

    rows = photos.map(decoded)
    loader = make_loader(
        rows, 8, shuffle=False, collate_fn=lambda rows: [torch.as_tensor(row["image"]) for row in rows]
    )
    assert [image.shape[1] for batch in loader for image in batch] == [20 + row % 5 for row in range(ROWS)]


def test_images_and_captions(photos, write, cache):
    """Image and text of each row, through the processors of a CLIP model."""
    from tiny import sentences, tokenizer
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    columns = {"image": [jpeg(row) for row in range(ROWS)], "text": sentences(ROWS)}
    rows = make_dataset(write(columns, "captions"), cache=cache)
    tokens = tokenizer()
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})

    def collate(rows):
        text = tokens([row["text"] for row in rows], padding=True, return_tensors="pt")
        images = processor([pixels_of(row["image"]) for row in rows], return_tensors="pt")
        return {"input_ids": text.input_ids, "attention_mask": text.attention_mask, **images}

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text_config = {**small, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 3}
    config = CLIPConfig(text_config=text_config, vision_config={**small, "image_size": 16, "patch_size": 8})
    model = CLIPModel(config)

    def loss(model, batch):
        return model(**batch, return_loss=True).loss

    loader = make_loader(rows, 8, collate_fn=collate)
    history = fit(model, torch.optim.Adam(model.parameters(), 1e-3), loader, loss, epochs=2, progress=False)
    assert history[0]["rows"] == ROWS


def test_default_collate_over_our_dataset(images):
    """The DataLoader of torch with its default collate and workers, over our dataset."""
    batches = [*DataLoader(images, 8, shuffle=True, num_workers=2)]
    assert [tuple(batch["image"].shape) for batch in batches] == [(8, 3, 16, 16)] * 4
