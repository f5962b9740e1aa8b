"""Fails when a new torch moves or changes a private name that the pipeline leans on (pipeline/torch_internals.py)."""

import inspect

from torch.distributed.pipelining import schedules, stage

from hf_meshadapt.pipeline import torch_internals


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_names_exist():
    for name in torch_internals.__all__:
        assert getattr(torch_internals, name)


def test_stage_methods_have_the_overridden_signatures():
    base = torch_internals.PipelineStage
    assert parameters(base._setup_forward_recv_info) == ["self", "num_microbatches", "has_backward"]
    assert parameters(base._create_grad_recv_info) == ["self", "act_send_info"]
    assert parameters(base._retrieve_recv_activations) == ["self", "fwd_chunk_id"]
    assert parameters(base._retrieve_recv_grads) == ["self", "bwd_chunk_id"]
    assert parameters(base.backward_one_chunk) == ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    assert {"input_args", "output_args", "group"} <= set(parameters(base.__init__))


def test_stage_syncs_only_on_the_last_backward():
    """WireStage gates data-parallel syncs with last_backward; torch must still take it for that."""
    source = inspect.getsource(stage._PipelineStageBase.backward_maybe_with_nosync)
    assert "if last_backward:" in source and "prepare_for_backward" in source


def test_a_stage_votes_at_start_up_on_its_device():
    """WireStage changes the device meanwhile, since gloo sends host memory only."""
    base = torch_internals.PipelineStage
    for method in (base._warmup_forward_vote, base._warmup_backward_result):
        source = inspect.getsource(method)
        assert "device=self.device" in source and "dist.recv(" in source and "dist.send(" in source


def test_a_stage_can_be_told_to_forget():
    base = torch_internals.PipelineStage
    assert parameters(base.clear_runtime_states) == ["self"]
    assert "self.fwd_cache.clear()" in inspect.getsource(base.clear_runtime_states)


def test_schedule_hooks():
    base = torch_internals.ScheduleGPipe
    expected = ["self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs"]
    assert parameters(base._step_microbatches) == expected
    for name in ("_check_inputs", "_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        assert hasattr(base, name)
    assert parameters(schedules._PipelineSchedule.eval) == ["self", "args", "target", "losses", "kwargs"]


def test_receive_info_has_a_replaceable_buffer():
    assert "buffer" in parameters(torch_internals.RecvInfo.__init__)
