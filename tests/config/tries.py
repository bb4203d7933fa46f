"""How every option is tried: two or more of its values, and what it takes for them to make a difference.

`test_every_value.py` trains three tiny steps with each value and asks for different numbers, parts, files or words. An option
whose values are a closed set (`choice`, true and false) needs no values here. What a tiny run on one CPU cannot show is
held by another test, which is named.
"""

from __future__ import annotations

from dataclasses import dataclass

# a run of three steps: 21 samples, so that the third window of an epoch is short
BASE = (
    "logger=none", "threads=1", "scheduler=constant", "optimizer.lr=0.01",
    "batch.effective=8", "batch.shard=4",
    "epochs=null", "steps=4", "log_every=1", "eval_every=2",
)  # fmt: skip
MLP = ("model=mlp", "model.width=4", "model.depth=1")  # unless the words name a model
SYNTHETIC = ("data=synthetic", "data.samples=21", "data.eval_samples=6", "data.image_size=8")  # unless they name data
SCALED = "precision=amp precision.dtype=float16 batch.effective=4 steps=3 "
CONV = "model=timm model.arch=test_resnet batch.effective=6 batch.shard=3 sampler.tail=drop steps=2 "
WRAPPED = "parallel/test_parallel.py::"
ON_A_CARD = "runtime/test_gpu_defaults.py::"
SWEPT = "cli/test_sweeps_parallel.py::"
SAVING = "checkpoint/test_checkpoint_saving.py::"
HF = "data/test_data_hugging_face.py::"


@dataclass(frozen=True)
class Try:
    """
    Args:
        words: that the option says something with. values: to compare; empty: the closed set.
        held_by: tests of what a tiny run cannot show; then nothing is run.
        read_in: the room that has to read it, where nothing more can be asked for here.
        entry: of an option that is a mapping, what is set.
        same: why it cannot make a difference, and need not.
    """

    words: str = ""
    values: tuple[str, ...] = ()
    held_by: str = ""
    same: str = ""
    entry: str = ""
    read_in: str = ""


def on(words: str, *values: object) -> Try:
    return Try(words, tuple(str(value) for value in values))


def read(room: str) -> Try:
    """What shows in other programs, on other devices or in time alone: here only that its room reads it."""
    return Try(read_in=room)


def entry(words: str, name: str, *values: object) -> Try:
    """Of an option that is a mapping: an entry of it."""
    return Try(words, tuple(str(value) for value in values), entry=name)


def held(by: str) -> Try:
    return Try(held_by=f"tests/{by}")


# `group.option` of all choices that have it, `group=choice.option` of one
TRIES: dict[str, Try] = {
    # parallel: ranks do not fit into this process, but their plan does
    "parallel.devices": held("launch/test_distributed.py::test_devices_are_picked_in_order_out_of_the_visible_ones"),
    "parallel.replicas": on("parallel=dp", 1, 2),
    "parallel.nproc": on("parallel=ddp task=plan", 2, 3),
    "parallel.backend": held("runtime/test_accelerator.py::test_ranks_meet_over_the_devices_own_backend"),
    "parallel.find_unused_parameters": held(WRAPPED + "test_false_on_a_model_with_unused_parameters_ends_before_an_update"),
    "parallel.timeout_s": held("cli/test_launch.py::test_a_rank_that_hangs_is_ended_by_the_time_limit_and_named"),
    "parallel.reduce_dtype": held(WRAPPED + "test_gradients_added_otherwise_have_the_same_mean"),
    "parallel.bucket_mb": held(WRAPPED + "test_apexs_options_send_otherwise_and_give_the_same_gradients"),
    "parallel.gradient_predivide": held(WRAPPED + "test_apexs_options_send_otherwise_and_give_the_same_gradients"),
    "parallel.gradient_average": held(WRAPPED + "test_apexs_options_send_otherwise_and_give_the_same_gradients"),
    "parallel.delay_allreduce": held(WRAPPED + "test_apexs_options_send_otherwise_and_give_the_same_gradients"),
    "parallel.blocks": held("parallel/test_sharding.py::test_blocks_are_what_a_model_lists"),
    **dict.fromkeys(("parallel.reshard_after_forward", "parallel.reshard_between_micro_steps",
                     "parallel.reduce_between_micro_steps", "parallel.shard_size"),
                    held("planner/test_planner_wire.py::test_torch_gathers_and_reduces_as_often_as_the_plan_says")),
    # precision
    "precision.tf32": held(ON_A_CARD + "test_fp32_leaves_torchs_own_tf32_setting_and_one_key_changes_it"),
    "precision=autocast.dtype": on("precision=amp"),
    "precision=master.dtype": on("precision=O2"),
    "precision=half.dtype": on("precision=O3"),
    "precision.loss_scale": on(SCALED + "precision.growth_interval=1", 1024, "static:1024", "null"),
    "precision=half.loss_scale": on("precision=O3", "null", 1024),
    "precision.growth_factor": on(SCALED + "precision.growth_interval=1 precision.loss_scale=8", 2, 4),
    "precision.backoff_factor": on(SCALED + "precision.loss_scale=1e30", 0.5, 0.25),
    "precision.growth_interval": on(SCALED + "precision.loss_scale=8", 1, 2),
    "precision.min_loss_scale": on(SCALED + "precision.loss_scale=1e30", 1, 1e30),
    "precision.cache_enabled": read("precision"),
    "precision.keep_batchnorm_fp32": on("precision=amp"),
    "precision=master.keep_batchnorm_fp32": on("precision=O2"),
    "precision=half.keep_batchnorm_fp32": on("precision=O3 precision.dtype=bfloat16 model.norm=true"),
    # sampler
    "sampler.tail": on(""),
    "sampler.passes": on("", 1, 2),
    "sampler.samples": on("", 9, 12),
    "sampler=computed.samples": on("sampler.balanced=true", 9, 12),
    "sampler.repeats": on("", 3, 2),
    "sampler.block": on("sampler.mix=2", 4, 8),
    "sampler.mix": on("sampler.block=4", 1, 2),
    "sampler.balanced": on(""),
    "accumulation.steps": on("", 1, 2),
    "reduction.method": on("batch.shard=1"),
    "reduction.bucket_mb": read("reduction"),
    # data
    "data.num_workers": held("data/test_data_workers.py::test_workers_follow_from_the_cores"),
    "data.persistent_workers": read("data"),
    "data.prefetch": read("data"),
    "data.pin_memory": read("data"),
    "data.on_error": on("data.root={damaged}"),
    "data=torchvision.on_error": read("data"),  # of sets that have to be downloaded
    "data.holdout": on("data.fold=null", 0.3, 0.4),
    "data.fold": on("data.folds=3", 0, 1),
    "data.folds": on("data.fold=0", 2, 3),
    "data.stratified": on("data.fold=0 data.folds=3"),
    "data=mask_folder.stratified": Try(same="masks have no class that could be held out in proportion"),
    **dict.fromkeys((f"data=torchvision.{key}" for key in ("holdout", "fold", "folds", "stratified", "split_seed")),
                    held("data/test_splits.py::test_a_torchvision_set_has_its_own_test")),
    "data.split_seed": on("data.fold=0 data.folds=3", 0, 1),
    "data.size": on("", 16, 8),
    "data.matrix_seed": on("", 0, 1),
    "data.samples": on("", 21, 18),
    "data.eval_samples": on("", 6, 7),
    "data.image_size": on("", 8, 12),
    "data=mask_folder.image_size": on("", 32, 64),
    "data.in_chans": on(""),
    "data=synthetic.in_chans": on("", 3, 1),
    "data.num_classes": on("", 10, 5),
    "data.signal": on("", 0.5, 0.9),
    "data.sizes": on("", "null", "[[0,40],[1,64]]"),
    "data.eval_size": on("", 32, 64),
    "data.crop_pct": on("", 1, 0.5),
    "data.interpolation": on(""),
    "data.decode": on("data.root={large}"),
    "data.exif": on("data.root={turned}"),
    "data.pixel_range": on("data.root={deep}", "null", "[0,20000]"),
    "data.max_pixels": on("", "null", 10),
    "data.mean": on("", "[0.5,0.5,0.5]", "[0,0,0]"),
    "data.std": on("", "[0.5,0.5,0.5]", "[1,1,1]"),
    "data.fingerprint": on(""),
    "data.root": on("", "{photos}", "{turned}"),
    "data.train_dir": on("", "train", "val"),
    "data.eval_dir": on("", "train", "val"),
    "data.test_dir": on("", "val", "nowhere"),
    "data.class_map": on("", "null", "{map}"),
    "data.images": on("", "images", "nowhere"),
    "data.masks": on("", "masks", "nowhere"),
    "data.classes": on("", "[ground,house]", "[ground]"),
    "data.ignored": on("", 255, 1),
    "data.train_csv": on("", "train.csv", "val.csv"),
    "data.eval_csv": on("", "train.csv", "val.csv"),
    "data.test_csv": on("", "val.csv", "nowhere.csv"),
    "data.path_column": on("", "path", "nowhere"),
    "data.label_columns": on("loss=bce", "[a,b]", "[a]"),
    "data.target_columns": on("loss=mse", "[a,b]", "[a]"),
    "data.train_tars": on("", "train-*.tar", "val-*.tar"),
    "data.eval_tars": on("", "train-*.tar", "val-*.tar"),
    "data.test_tars": on("task=evaluate evaluate.split=test {begun}", "val-*.tar", "nowhere.tar"),
    "data.image_member": on("", "jpg", "small.jpg"),
    "data.label_member": on("", "json", "nowhere"),
    "data.label_key": on("", "label", "other"),
    "data.cache_dir": held("data/test_data_webdataset.py::test_an_index_goes_to_the_cache_where_the_tars_cannot_be_written"),
    "data=hugging_face.cache_dir": held(HF + "test_what_cannot_be_loaded_is_refused_in_one_line"),
    "data.path": held(HF + "test_a_saved_data_set_is_read_row_by_row"),
    "data.subset": held(HF + "test_what_cannot_be_loaded_is_refused_in_one_line"),
    "data.revision": held(HF + "test_what_cannot_be_loaded_is_refused_in_one_line"),
    "data.train_split": held(HF + "test_splits_and_columns_that_cannot_be_used_are_refused"),
    "data.eval_split": held(HF + "test_splits_and_columns_that_cannot_be_used_are_refused"),
    "data.test_split": held(HF + "test_splits_and_columns_that_cannot_be_used_are_refused"),
    "data.image_column": held(HF + "test_labels_may_be_words_and_images_plain_bytes"),
    "data.label_column": on("", "label", "other"),
    "data=hugging_face.label_column": held(HF + "test_labels_may_be_words_and_images_plain_bytes"),
    "data.dataset": held("data/test_splits.py::test_a_torchvision_set_has_its_own_test"),
    "data.download": held("data/test_data_files.py::test_a_torchvision_set_is_read_or_its_absence_refused"),
    # augment
    "augment.crop": on("{files}"),
    "augment.scale": on("{files}", "[0.08,1]", "[0.5,0.5]"),
    "augment.ratio": on("{files}", "[0.75,1.33]", "[1,1]"),
    "augment.random_interpolation": on("{files}"),
    "augment.padding": on("", 4, 1),
    "augment.flip": on("", 0, 1),
    "augment.vflip": on("", 0, 1),
    "augment.color_jitter": on("", 0, 0.4),
    "augment.jitter_prob": on("augment.color_jitter=0.4", 1, 0.3),
    "augment.grey": on("", 0, 1),
    "augment.blur": on("", 0, 1),
    "augment.erase": on("", 0, 1),
    "augment.erase_mode": on("augment.erase=1"),
    "augment.erase_count": on("augment.erase=1", 1, 3),
    "augment.mixup": on("", 0, 0.4),
    "augment.cutmix": on("", 0, 1),
    "augment.switch": on("augment.mixup=0.4 augment.cutmix=1", 0, 1),
    "augment.mix_prob": on("augment.mixup=0.4", 0.1, 1),
    "augment.mix_mode": on("augment.mixup=0.4"),
    "augment.cutmix_sides": on("augment.cutmix=1", "null", "[0.2,0.4]"),
    "augment.mix_until": on("augment.mixup=0.4", "null", 1),
    "augment=randaugment.policy": on("{files}", "rand-m9-mstd0.5-inc1", "rand-m2-n1"),
    "augment=autoaugment.policy": on("{files}", "original", "3a"),
    "augment=augmix.policy": on("{files}", "augmix-m3-w3", "augmix-m9-w1"),
    # model
    "model.batch_norm": on("model.norm=true parallel=ddp"),
    "model=linear.batch_norm": on(""),
    "model=timm.batch_norm": on(""),
    "model=smp.batch_norm": on(""),
    "model.head_init_scale": on("", "null", 0),
    "model.head_init_bias": on("", "null", 1),
    "model.freeze": on("", "[]", "['*bias']"),
    "model.table": on("model.table=false", "false", "true"),
    "model.arch": on(CONV, "test_resnet", "test_efficientnet"),
    "model=smp.arch": on("", "Unet", "UnetPlusPlus"),
    "model.encoder": on("", "resnet18", "mobilenet_v2"),
    "model.pretrained": held("resume/test_weights_know.py::test_an_evaluation_without_a_run_is_timms_own"),
    "model.checkpoint_path": on(CONV, "null", "nowhere"),
    "model.drop_rate": on("", 0, 0.5),
    "model.drop_path_rate": on("model.arch=test_convnext", 0, 0.5),
    "model.grad_checkpointing": held(
        "train/test_training_options.py::test_each_changes_what_is_trained_and_what_only_saves_memory_does_not"
    ),
    "model.small_stem": on("model.arch=resnet18"),
    "model.kwargs": entry("", "act_layer", "relu", "silu"),
    "model=smp.kwargs": entry("", "decoder_channels", "[8,4]", "[4,4]"),
    "model.outputs": on("", 10, 12),
    "model.bias": on(""),
    "model.init": on(""),
    "model.width": on("", 4, 5),
    "model.depth": on("", 1, 2),
    "model.norm": on(""),
    # loss
    "loss.label_smoothing": on("", 0, 0.1),
    "loss.class_weights": on("", "null", "[2,1,1,1,1,1,1,1,1,1]"),
    "loss.ignore_index": on("", "null", 3),
    "loss.gamma": on("", 2, 0),
    "loss.target_threshold": on("augment=simple augment.mixup=1", "null", 0.4),
    "loss.sum_classes": on(""),
    "loss.pos_weight": on("", "null", 3),
    "loss.num_splits": on("", 2, 3),
    "loss.alpha": on("", 12, 1),
    "loss.noise": on("", 0.3, 0.1),
    "loss.shift": on("", 0.125, 0.3),
    "loss.temperature": on("", 2, 4),
    "loss.weight": on("", 0.5, 0.1),
    "loss.teacher": entry("", "arch", "test_resnet", "test_efficientnet"),
    # optimizer
    "optimizer.opt": on("", "adamw", "sgd"),
    "optimizer.lr": on("", 0.01, 0.02),
    "optimizer.weight_decay": on("", 0, 0.1),
    "optimizer.momentum": on("optimizer=sgd", 0, 0.9),
    "optimizer.decay_norms_and_biases": on("optimizer.weight_decay=0.1"),
    "optimizer.layer_decay": on(CONV, "null", 0.5),
    "optimizer.reference_batch": on("", "null", 16),
    "optimizer.reference_rule": on("optimizer.reference_batch=16"),
    "optimizer.fused": on(""),
    "optimizer.kwargs": entry("", "eps", 1e-8, 0.1),
    "optimizer.groups": on("", "[]", "[{{match:'1',lr:0}}]"),
    "optimizer.norm_decay": on("model.norm=true", 0, 0.1),
    "optimizer.bias_decay": on("", 0, 0.1),
    "optimizer.embedding_decay": read("optimizer"),
    "optimizer.sam": on("", "null", 0.1),
    "optimizer.sam_adaptive": on("optimizer.sam=0.1"),
    # scheduler
    "scheduler.warmup": on("", 0, 2),
    "scheduler.warmup_start": on("scheduler.warmup=3", 0, 0.005),
    "scheduler.warmup_shape": on("scheduler.warmup=3 scheduler.warmup_start=0.001"),
    "scheduler.per_epoch": on("steps=6"),
    "scheduler=constant.per_epoch": on("scheduler.warmup=4 steps=6"),
    "scheduler=plateau.per_epoch": on("scheduler.warmup=4 steps=6"),
    "scheduler.final": on("", 0, 0.005),
    "scheduler.cooldown": on("", 0, 2),
    "scheduler=plateau.cooldown": on("eval_every=1 scheduler.patience=0 scheduler.threshold=0.9 steps=6", 0, 2),
    "scheduler.cycle": on("", "null", 2),
    "scheduler.cycle_mul": on("scheduler.cycle=1", 1, 2),
    "scheduler.cycle_decay": on("scheduler.cycle=1", 1, 0.5),
    "scheduler.peak": on("", 0.3, 0.6),
    "scheduler.div": on("", 25, 5),
    "scheduler.final_div": on("", 10000, 2),
    "scheduler.metric": on("eval_every=1 scheduler.patience=0 scheduler.threshold=1e-4", "eval/loss", "eval/accuracy"),
    "scheduler.mode": on("eval_every=1 scheduler.patience=0 scheduler.threshold=1e-4 scheduler.metric=eval/loss"),
    "scheduler.gamma": on("", 0.1, 0.5),
    "scheduler.patience": on("eval_every=1 scheduler.threshold=0.9 steps=6", 0, 2),
    "scheduler.threshold": on("eval_every=1 scheduler.patience=0", 1e-4, 0.9),
    "scheduler=plateau.final": on("eval_every=1 scheduler.patience=0 scheduler.threshold=0.9", 0, 0.5),
    "scheduler=step.final": on("scheduler.at=[1]", 0, 0.5),
    "scheduler=wsd.final": on("scheduler.decay=3", 0, 0.5),
    "scheduler=wsd.per_epoch": on("scheduler.decay=4 steps=6"),
    "scheduler=plateau.gamma": on("eval_every=1 scheduler.patience=0 scheduler.threshold=0.9", 0.1, 0.5),
    "scheduler.power": on("", 1, 2),
    "scheduler.at": on("", "[1]", "[2]"),
    "scheduler=timm.at": on("scheduler.sched=multistep", "[1]", "[2]"),
    "scheduler=timm.every": on("scheduler.sched=step", 1, 2),
    "scheduler.every": on("scheduler.at=[]", 1, 2),
    "scheduler.low": on("", -7, -2),
    "scheduler.high": on("", 3, 1),
    "scheduler.sched": on("steps=100 scheduler.warmup=2"),
    "scheduler.length": on("", 4, 2),
    "scheduler.timescale": on("scheduler.sched=rsqrt", 1, 2),
    "scheduler.kwargs": entry("scheduler.length=2", "cycle_limit", 1, 2),
    "scheduler.decay": on("", 1, 3),
    "scheduler.decay_shape": on("scheduler.decay=3"),
    # the rest of a training
    "ema.decay": on("ema.warmup=false", 0.5, 0.9),
    "ema.warmup": on(""),
    "ema.device": held("parallel/test_sharding.py::test_what_cannot_be_is_refused_by_the_config_alone"),
    "ema.start": on("", 1, 3),
    "ema.every": on("ema.start=1", 1, 2),
    "clip.max_norm": on("", 1, 0.1),
    "clip.max_value": on("", 1, 0.01),
    "clip.factor": on("", 0.01, 0.1),
    "clip.eps": on("", 0.001, 0.1),
    "clip.head": on(""),
    "stop.metric": on("eval_every=1 stop.patience=1", "eval/loss", "eval/accuracy"),
    "stop.mode": on("eval_every=1 stop.patience=1 stop.metric=eval/loss"),
    "stop.patience": on("eval_every=1 stop.min_delta=10 steps=5", 1, 3),
    "stop.min_delta": on("eval_every=1 stop.patience=1", 0, 10),
    "stop.threshold": on("stop.metric=eval/loss stop.patience=null", 100, 0),
    "stop.max_time": held("test_stop.py::test_time_is_up_for_all_ranks_at_one_step"),
    "metrics.names": on("", "[MulticlassF1Score]", "[MulticlassAccuracy]"),
    "metrics.kwargs": entry(
        "metrics.names=[MulticlassF1Score] data.eval_samples=60", "MulticlassF1Score.average", "micro", "macro"
    ),
    "checkpoint.resume": on("{begun}"),
    "checkpoint.load": on("{begun}", "last", "nowhere"),
    "checkpoint.weights": on("{averaged} task=evaluate ema=ema"),
    "checkpoint.every": on("checkpoint.keep=4", 1, 2),
    "checkpoint.every_minutes": held(SAVING + "test_saving_by_the_clock_is_the_main_ranks_request"),
    "checkpoint.keep": on("checkpoint.every=1", 1, 2),
    "checkpoint.keep_best": on("eval_every=1", 0, 2),
    "checkpoint.best": on("", "eval/loss", "null"),
    "checkpoint.mode": on("checkpoint.best=eval/loss eval_every=1"),
    "audit.state": on("reduction=exact", "null", 1),
    "audit.every": held("audit/test_audit.py::test_a_resumed_run_is_audited_at_the_same_steps"),
    "audit.on_mismatch": held("audit/test_audit.py::test_a_warning_lets_the_run_go_on"),
    # what looks on
    "logger.histograms": read("logger"),
    "logger.histograms_every": read("logger"),
    "logger.mode": held("logger/test_logger.py::test_without_a_key_auto_is_offline_in_one_line"),
    "logger.project": read("logger"),
    "logger.entity": read("logger"),
    "logger.run_name": read("logger"),
    "logger.tags": read("logger"),
    "logger.notes": read("logger"),
    "logger.predictions": read("logger"),
    "logger.predictions_at": held("logger/test_logger_artifacts.py::test_predictions_of_each_evaluation_change_nothing"),
    "logger.log_checkpoints": held("logger/test_logger_artifacts.py::test_code_and_checkpoint_are_artifacts"),
    "logger.registry": held("logger/test_logger_artifacts.py::test_a_checkpoint_is_linked_when_it_is_there"),
    "logger.code": held("logger/test_logger_artifacts.py::test_code_and_checkpoint_are_artifacts"),
    "logger.system_metrics": read("logger"),
    "logger.alerts": held("logger/test_logger.py::test_which_alerts_there_are"),
    "logger.save_files": read("logger"),
    "logger.finish_timeout_s": read("logger"),
    "logger.flush_s": read("logger"),
    "logger.tracking_uri": held("logger/test_logger_mlflow.py::test_what_the_server_is_told"),
    "logger.loggers": on("", "[csv]", "[]"),
    "debug.windows": on("", 1, 2),
    "profile.start": read("profile"),
    "profile.steps": read("profile"),
    "profile=memory.steps": read("profile"),  # CUDA's own history
    "profile.all_ranks": read("profile"),
    "profile.stacks": read("profile"),
    "profile.events": read("profile"),
    "profile.peak_tflops": on("", "null", 1),
    # no group
    "task": on("epochs=null"),
    "seed": on("", 0, 1),
    "epochs": on("steps=null", 1, 2),
    "steps": on("", 2, 3),
    "max_grad_norm": on("", "null", 0.1),
    "log_every": on("", 1, 2),
    "eval_every": on("", 1, 2),
    "log_weights": on("", 0, 2),
    "warmup": on("", 0, 2),
    "resume": on("", "null", "nowhere"),
    "allow_contract_change": on("{begun} seed=3"),
    "imports": on("", "[]", "[nowhere]"),
    "deterministic": on(""),
    "threads": on("", 1, 2),
    "device": on(""),
    "compile": held("model/test_freezing.py::test_compile_takes_torchs_modes"),
    "cuda_graph": on(""),
    "channels_last": on(CONV),
    "on_nonfinite": on("optimizer.opt=sgd optimizer.lr=1e6 log_every=1 steps=6"),
    "batch.effective": on("", 8, 6),
    "batch.shard": on("model.norm=true", 4, 2),
    "batch.micro": on("", 4, 8),
    "batch.eval": on("", 2, 3),
    "sweep.tolerance": on("", "null", 0),
    "sweep.skip_unavailable": held("parallel/test_strategies.py::test_what_the_machine_cannot_run_is_skipped_with_the_reason"),
    "sweep.dry_run": held(SWEPT + "test_a_dry_run_lists_plans_without_torch_and_leaves_nothing"),
    "sweep.parallel_jobs": held(SWEPT + "test_jobs_at_once_are_the_jobs_alone_and_a_failed_one_stops_no_other"),
    "sweep.objective": held("cli/test_search.py::test_the_direction_is_the_objectives"),
    "sweep.mode": held("cli/test_search.py::test_the_direction_is_the_objectives"),
    "cost.bandwidth_gb_s": on("task=plan", 1, 2),
    "cost.latency_us": on("task=plan cost.bandwidth_gb_s=1", 20, 40),
    "replay.from": on("task=replay {begun}", 0, 2),
    "replay.steps": on("task=replay {begun} replay.from=0", 1, 2),
    "predict.path": held("tasks/test_predict.py::test_a_folder_a_csv_and_a_tar_give_the_same_rows_by_name"),
    "predict.column": held("tasks/test_predict.py::test_a_folder_a_csv_and_a_tar_give_the_same_rows_by_name"),
    "predict.top": held("tasks/test_predict.py::test_a_folder_a_csv_and_a_tar_give_the_same_rows_by_name"),
    "evaluate.split": on("task=evaluate {begun}"),
    "evaluate.views": on(CONV + "data.image_size=32"),
    "lr_range.start": on("task=lr_range lr_range.steps=10", 1e-6, 1e-4),
    "lr_range.end": on("task=lr_range lr_range.steps=10", 10, 1),
    "lr_range.steps": on("task=lr_range", 10, 11),
    "lr_range.diverged": on("task=lr_range lr_range.end=1e6 lr_range.steps=12", 1, 1e8),
}  # fmt: skip

IMAGES = CONV + "data.image_size=32 data.num_workers=0 "
# the words that a class of options comes with; by default those of its name in conf/
CHOICES = {
    "precision=full": "precision=fp32", "precision=autocast": "precision=amp", "precision=master": "precision=O2",
    "precision=half": "precision=O3", "accumulation=accumulation": "accumulation=2", "optimizer=timm": "optimizer=adamw",
    "stop=rules": "stop=early", "checkpoint=checkpoint": "checkpoint=default", "data=digits": "data=digits steps=2",
    "data=diabetes": "data=diabetes loss=mse", "data=random_matrix": "data=random_matrix model=linear loss=output_sum",
    "data=torchvision": "data=cifar10",
    "data=image_folder": "data=image_folder data.root={image_folder_photos} " + IMAGES,
    "data=hugging_face": "data=hugging_face data.path={hugging_face_photos} data.eval_split=val " + IMAGES,
    "data=csv": "data=csv data.root={csv_photos} " + IMAGES,
    "data=webdataset": "data=webdataset data.root={webdataset_photos} data.label_member=json data.image_member=jpg " + IMAGES,
    "data=mask_folder": "data=mask_folder data.root={mask_folder_photos} data.classes=[ground,house] data.num_workers=0 "
                        "data.image_size=32 batch.shard=4 sampler.tail=drop model=smp "
                        "+model.kwargs.decoder_channels=[8,4] +model.kwargs.encoder_depth=2 "
                        "batch.effective=4 steps=2",
    "model=timm": CONV + "data.image_size=32", "model=smp": "{masks}",
    "loss=distill": "loss=distill ++loss.teacher.arch=test_resnet", "loss=mse": "loss=mse data=diabetes",
    "sampler=blocks": "sampler=blocks sampler.block=4 sampler.mix=2", "clip=value": "clip=value clip.max_value=0.01",
    "profile=trace": "profile=trace profile.start=0 profile.steps=1",
    "scheduler=restarts": "scheduler=restarts scheduler.cycle=8",
    "scheduler=plateau": "scheduler=plateau scheduler.patience=0 scheduler.threshold=0.9",
    "logger=several": "logger=several logger.loggers=[csv]",
}  # fmt: skip

# group -> the words with which each of its files in conf/ trains otherwise than the rest
CHOICES_OF = {
    **dict.fromkeys(("sampler", "reduction", "optimizer", "ema", "clip", "checkpoint", "profile", "model"), on("")),
    "precision": on(""), "accumulation": on("batch.shard=1"), "augment": on(""), "loss": on(""),
    "scheduler": on("scheduler.per_epoch=false steps=30 eval_every=5"), "metrics": on(""), "audit": on("audit.state=null"),
    "debug": on(""),
    "stop": held("test_stop.py::test_patience_threshold_and_direction"),
    "data": held("data/test_data_custom.py::test_a_dataset_function_gives_two_splits_and_what_a_model_needs"),
    "parallel": held(WRAPPED + "test_apexs_options_send_otherwise_and_give_the_same_gradients"),
    "logger": held("logger/test_logger.py::test_several_loggers_get_everything"),
    "writer": held("tasks/test_predict.py::test_parquet_holds_the_same_rows"),
}  # fmt: skip
# choices that are others' names, or are others on a CPU: (group, name) -> why
ALIKE = {
    ("precision", "O0"): "apex's name of fp32", ("precision", "O1"): "apex's name of amp",
    ("precision", "bf16"): "what amp is on a CPU", ("precision", "tf32"): "of CUDA alone: runtime/test_gpu_defaults.py",
    ("accumulation", "1"): "what follows from this batch", ("debug", "anomaly"): "looks on: profile/test_debug_profile.py",
    **{("model", name): "too large for a tiny run" for name in ("resnet50", "resnet101", "vit_small", "smp")},
}  # fmt: skip
