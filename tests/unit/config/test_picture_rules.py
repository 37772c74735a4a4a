"""The rules of pictures: the encoder's keys, the data that pictures exclude, and what training needs."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

PICTURES = ("--model.picture_size=32", "--model.patch_size=8", "--model.encoder_num_heads=8")
DRAWN = (*PICTURES, "--data.pictures=drawn")
MIXED = (*PICTURES, "--data_source.pictures=drawn", "--data_source-2.path=web")
SHARDS = (*PICTURES, "--data.pictures=shards", "--pictures.shards=web", "--data.tokenizer=tokenizer.json")
HELD_OUT_SHARDS = ("--validation_set.pictures=shards", "--validation_set.path=held-out")
MIXED_SHARDS = (*SHARDS, "--data.pictures=none", "--data_source.pictures=shards", "--data_source-2.path=web")
CASES = {
    "pictures": (PICTURES, None),
    "drawn pictures": (DRAWN, None),
    "an encoder without pictures": (
        ["--model.encoder_num_layers=2"],
        ("model.encoder_num_layers=2 does nothing with model.picture_size=0; set picture_size, or remove "
         "encoder_num_layers (--model.encoder_num_layers on the command line)"),
    ),
    "patches that do not fit": (
        ["--model.picture_size=30", "--model.patch_size=8"],
        ("model.patch_size=8 must divide model.picture_size=30; use patch_size 1, 2, 3, 5, 6, 10, 15 or 30, or "
         "picture_size 24 or 32 (--model.picture_size on the command line)"),
    ),
    "heads that do not fit": (
        [*PICTURES[:2], "--model.encoder_hidden_size=100", "--model.encoder_num_heads=8"],
        ("the encoder's heads, model.encoder_num_heads=8 (0: model.num_heads=20), must divide its hidden size 100; "
         "use 1, 2, 4, 5, 10, 20, 25 or 50 (--model.encoder_num_heads on the command line)"),
    ),
    "more patches than tokens": (
        ["--model.picture_size=64", "--model.patch_size=8"],
        ("a sample has 64 tokens, and the patches of its picture take the first 64 ((model.picture_size=64 / "
         "model.patch_size=8) squared); use longer samples, smaller pictures or larger patches "
         "(--model.picture_size on the command line)"),
    ),
    "patches that ranks cannot divide": (
        ["--model.picture_size=24", "--model.patch_size=8", "--parallel.tp_size=2"],
        ("parallel.tp_size=2 must divide the 9 patches of a picture; use 1, 3 or 9 (--parallel.tp_size on the "
         "command line)"),
    ),
    "heads that ranks cannot divide": (
        [*PICTURES[:2], "--model.encoder_num_heads=2", "--parallel.tp_size=4"],
        ("parallel.tp_size=4 must divide the 2 heads of the encoder; use 1 or 2 (--parallel.tp_size on the command "
         "line)"),
    ),
    "drawn pictures that no model takes": (
        ["--data.pictures=drawn"],
        ('data.pictures="drawn" does nothing with model.picture_size=0; set picture_size, or use pictures="none" '
         "(--data.pictures on the command line)"),
    ),
    "drawn pictures that are too small": (
        [*DRAWN, "--model.picture_size=16"],
        ('data.pictures="drawn" needs model.picture_size of at least 24, found 16: in smaller pictures the shapes '
         "look alike; use 24 or more (--data.pictures on the command line)"),
    ),
    "drawn pictures beside text": (
        [*DRAWN, "--data.train=web"],
        ('data.train="web" cannot be used with data.pictures="drawn": the text is the captions; use data.train="", '
         'a [[data_source]] for "web", data.pictures="none", and another [[data_source]] for the pictures '
         "(--data.train on the command line)"),
    ),
    "drawn pictures beside a source": (
        [*DRAWN, "--data_source.path=web"],
        ('data_source.path="web" cannot be used with data.pictures="drawn": data.pictures covers all samples; use '
         'data.pictures="none", and a [[data_source]] with pictures="drawn" (--data_source.path on the command line)'),
    ),
    "a source of drawn pictures": ([*PICTURES, "--data_source.pictures=drawn"], None),
    "a mixture of pictures and text": ([*MIXED, "--data.validation=held-out", "--data.balance=cost"], None),
    "a source of drawn pictures with a path": (
        [*MIXED, "--data_source.path=code"],
        ('data_source.path="code" cannot be used with data_source.pictures="drawn": the text is the captions; use '
         "another [[data_source]] for one of them (--data_source.path on the command line)"),
    ),
    "two sources of drawn pictures": (
        [*PICTURES, "--data_source.pictures=drawn", "--data_source-2.pictures=drawn", "--data_source-2.name=more"],
        ('data_source-2.pictures="drawn" cannot be used with data_source.pictures="drawn": only one source may have '
         "pictures; remove one of them (--data_source-2.pictures on the command line)"),
    ),
    "a mixture of shards and text": ([*MIXED_SHARDS, "--data.loader=host", "--data.balance=cost"], None),
    "a source of shards without a tokenizer": (
        [*MIXED_SHARDS, "--data.tokenizer="],
        ('data_source.pictures="shards" needs data.tokenizer, the tokenizer of the captions: the path of a '
         "tokenizer.json or of a NAME.model (--data.tokenizer on the command line)"),
    ),
    "shards beside drawn pictures": (
        [*SHARDS, "--data_source.pictures=drawn"],
        ('data_source.pictures="drawn" cannot be used with data.pictures="shards": only one source may have '
         "pictures; remove one of them (--data_source.pictures on the command line)"),
    ),
    "captions of masked documents dealt by cost": (
        [*SHARDS, "--data.balance=cost", "--data.has_document_mask=true"],
        ('data.balance="cost" cannot be used with data.pictures="shards": all samples cost the same; use '
         'balance="none" (--data.balance on the command line)'),
    ),
    "drawn pictures without a weight": (
        [*PICTURES, "--data_source.pictures=drawn", "--data_source.weight=0"],
        ("data_source.weight=0.0, and no other source has a weight; give one a weight above 0 "
         "(--data_source.weight on the command line)"),
    ),
    "a mixture dealt by files of costs": (
        [*MIXED, "--data.balance=file"],
        ('data.balance="file" cannot be used with data_source.pictures="drawn": captions have no file of costs; '
         'use balance="cost" or "none" (--data.balance on the command line)'),
    ),
    "equal pictures dealt by cost": (
        [*DRAWN, "--data.balance=cost"],
        ('data.balance="cost" needs data.has_document_mask=true, or sources with and without pictures: otherwise '
         'all samples cost the same; set it, or data.balance="none" or "file" (--data.balance on the command line)'),
    ),
    "drawn pictures by the loader of a host": ([*DRAWN, "--data.loader=host"], None),
    "pictures from shards": ([*SHARDS, "--data.loader=host", "--data.bad_samples=refuse"], None),
    "small pictures from shards": ([*SHARDS, "--model.picture_size=16"], None),
    "pictures from running producers": (
        [*SHARDS, "--pictures.addresses=a.example:7000, [::1]:7001", "--pictures.secret=secret"],
        None,
    ),
    "pictures from shards that no model takes": (
        ["--data.pictures=shards", "--pictures.shards=web", "--data.tokenizer=tokenizer.json"],
        ('data.pictures="shards" does nothing with model.picture_size=0; set picture_size, or use pictures="none" '
         "(--data.pictures on the command line)"),
    ),
    "shards without a directory": (
        [*PICTURES, "--data.pictures=shards", "--data.tokenizer=tokenizer.json"],
        ('data.pictures="shards" needs pictures.shards: the directory of the shards and their index, which '
         "`megatrain data pictures index` makes (--data.pictures on the command line)"),
    ),
    "captions without a tokenizer": (
        [*PICTURES, "--data.pictures=shards", "--pictures.shards=web"],
        ('data.pictures="shards" needs data.tokenizer, the tokenizer of the captions: the path of a tokenizer.json '
         "or of a NAME.model (--data.pictures on the command line)"),
    ),
    "a key of shards beside drawn pictures": (
        [*DRAWN, "--pictures.threads=2"],
        ('pictures.threads=2 does nothing with data.pictures="drawn"; use data.pictures="shards" or a '
         '[[data_source]] with pictures="shards", or remove threads (--pictures.threads on the command line)'),
    ),
    "shards behind a URL": (
        [*SHARDS, "--pictures.shards=s3://bucket/shards"],
        ('pictures.shards="s3://bucket/shards" is a URL; copy shards and index to a directory of each host, or use '
         "pictures.addresses of producers that have them (--pictures.shards on the command line)"),
    ),
    "an address without a port": (
        [*SHARDS, "--pictures.addresses=a:1,b", "--pictures.secret=secret"],
        ("pictures.addresses=\"a:1,b\": 'b' is not HOST:PORT; separate several by commas "
         "(--pictures.addresses on the command line)"),
    ),
    "addresses without their secret": (
        [*SHARDS, "--pictures.addresses=a:1"],
        ('pictures.addresses="a:1" and pictures.secret="" belong together: producers answer only programs that have '
         "their secret; set both, or neither (--pictures.addresses on the command line)"),
    ),
    "started producers beside addresses": (
        [*SHARDS, "--pictures.addresses=a:1", "--pictures.secret=secret", "--pictures.producers=2"],
        ("pictures.producers=2 does nothing with pictures.addresses: no producers are started; remove one of them "
         "(--pictures.producers on the command line)"),
    ),
    "packed captions": (
        [*SHARDS, "--data.packing=best_fit", "--data.has_document_mask=true"],
        ('data.packing="best_fit" cannot be used with data.pictures="shards": a caption is a sample; use '
         'packing="none" (--data.packing on the command line)'),
    ),
    "text to evaluate on": ([*SHARDS, "--data.validation=held-out"], None),
    "held-out drawn pictures": ([*DRAWN, "--validation_set.pictures=drawn"], None),
    "held-out pictures beside text": (
        [*MIXED_SHARDS, *HELD_OUT_SHARDS, "--validation_set-2.path=text", "--evaluation.interval=5"], None,
    ),
    "held-out pictures of another kind": (
        [*DRAWN, *HELD_OUT_SHARDS],
        ('validation_set.pictures="shards" needs training samples with pictures of the same kind; set '
         'data.pictures="shards" or a [[data_source]] with it, or use pictures="none" '
         "(--validation_set.pictures on the command line)"),
    ),
    "held-out pictures for a model of text": (
        ["--data.train=web", "--validation_set.pictures=drawn"],
        ('validation_set.pictures="drawn" needs training samples with pictures of the same kind; set '
         'data.pictures="drawn" or a [[data_source]] with it, or use pictures="none" '
         "(--validation_set.pictures on the command line)"),
    ),
    "held-out pictures beside data.validation": (
        [*DRAWN, "--validation_set.pictures=drawn", "--data.validation=text"],
        ('validation_set.pictures="drawn" and data.validation="text" both name held-out data; add a '
         "[[validation_set]] for data.validation (--validation_set.pictures on the command line)"),
    ),
    "held-out shards without a directory": (
        [*SHARDS, *HELD_OUT_SHARDS[:1]],
        ('validation_set.pictures="shards" needs validation_set.path: a directory of shards and their index on each '
         'host, which `megatrain data pictures index` makes; found "" (--validation_set.pictures on the command line)'),
    ),
    "held-out drawn pictures with a path": (
        [*DRAWN, "--validation_set.pictures=drawn", "--validation_set.path=held-out"],
        ('validation_set.path="held-out" does nothing with validation_set.pictures="drawn"; remove path '
         "(--validation_set.path on the command line)"),
    ),
    "held-out samples without room for a caption": (
        [*SHARDS, *HELD_OUT_SHARDS, "--evaluation.seq_len=16"],
        ("held-out samples have 16 tokens, and the patches of a picture take the first 16; use a larger "
         "evaluation.seq_len (--evaluation.seq_len on the command line)"),
    ),
}  # fmt: skip


def test_rules_of_pictures(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


def test_training_needs_pictures_for_a_model_that_takes_them(problems_of: ProblemsOf) -> None:
    (found,) = problems_of(*PICTURES, "--data.train=web", is_for_training=True)

    assert found.startswith(
        "model.picture_size=32 needs training samples with pictures, and "
        'data.pictures="none"; use data.pictures="shards" or "drawn", a [[data_source]] with pictures, or '
        "picture_size=0"
    )
    assert problems_of(*MIXED, is_for_training=True) == ()
    assert problems_of(*DRAWN, is_for_training=True) == ()
