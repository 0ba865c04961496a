"""Pages of /metrics.

``VLLM`` is what vLLM 0.32 sent during a run of 32 users, cut down to the figures that are read and some that must not
be mistaken for them; ``OURS`` has the lines of our own servers, ``SGLANG`` the names that SGLang documents, with values
chosen here.
"""

from pathlib import Path

VLLM = (Path(__file__).parent / "metrics" / "vllm-0.32.txt").read_text()

OURS = """\
# HELP gapmeter_requests_accepted_total Requests that the engine took.
# TYPE gapmeter_requests_accepted_total counter
gapmeter_requests_accepted_total{model="gapmeter"} 20
gapmeter_engine_preemptions_total{model="gapmeter"} 0
gapmeter_requests_running{model="gapmeter"} 4
gapmeter_requests_waiting{model="gapmeter"} 1
gapmeter_kv_blocks{model="gapmeter"} 256
gapmeter_kv_blocks_free{model="gapmeter"} 192
gapmeter_requests_finished_total{model="gapmeter",outcome="ok"} 20
"""

SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="llama"} 7.0
sglang:token_usage{model_name="llama"} 0.28
sglang:num_queue_reqs{model_name="llama"} 2.0
"""
