"""Parts of real /metrics pages, as their engines wrote them (names, labels and number formats; values chosen)."""

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="gapmeter"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="gapmeter"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="gapmeter",reason="capacity"} 5.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="gapmeter"} 0.0421875
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="gapmeter"} 4096.0
vllm:prefix_cache_queries_created{engine="0",model_name="gapmeter"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="gapmeter"} 1024.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="gapmeter"} 0.0
vllm:num_preemptions_total{engine="0",model_name="gapmeter"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="gapmeter"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="gapmeter"} 12.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="gapmeter"} 1.25
process_open_fds 42.0
"""

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
