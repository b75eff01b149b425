{{/* The policy file of the values under `autoscaling`. What cannot be meant is refused here, with the next step. */}}
{{- define "gpu-autoscaler.policy" -}}
{{- $auto := .Values.autoscaling }}
{{- if .Values.policy.text }}
{{- if and (not $auto.enabled) (not (regexMatch "(?m)^is_frozen *= *true" .Values.policy.text)) -}}
is_frozen = true
{{ end }}
{{- .Values.policy.text }}
{{- else -}}
is_frozen = {{ not $auto.enabled }}
pending_pod_timeout_seconds = {{ include "gpu-autoscaler.seconds" $auto.scaleUp.pendingPodTimeout }}
scale_down_cooldown_seconds = {{ include "gpu-autoscaler.seconds" $auto.scaleDown.cooldown }}
{{- $least := 0 }}
{{- range $auto.nodePools }}{{ $least = add $least (int (.minSize | default 0)) }}{{ end }}
nodes_count_min = {{ max (int $auto.limits.minNodes) $least }}
nodes_count_max = {{ int $auto.limits.maxNodes }}

[limits]
scale_up_cooldown_seconds = {{ include "gpu-autoscaler.seconds" $auto.scaleUp.cooldown }}

[utilization]
high_ratio = {{ $auto.scaleUp.threshold }}
low_ratio = {{ $auto.scaleDown.threshold }}

[spot]
storm_gpu_ratio_max = {{ if $auto.spot.diversify }}0.5{{ else }}1.0{{ end }}

[spot.mix]
{{ include "gpu-autoscaler.mix" $auto }}

[forecast]
is_on = {{ $auto.predictive.enabled }}
lookback_hours = {{ mul 24 (int $auto.predictive.lookbackDays) }}
confidence_ratio_min = {{ $auto.predictive.confidenceThreshold }}
ahead_ratio = {{ $auto.predictive.preWarmThreshold }}
{{- range default (list (dict "name" "default")) $auto.nodePools }}

[[pools]]
{{ include "gpu-autoscaler.pool" (dict "pool" . "isSpotOn" $auto.spot.enabled) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Shares of our GPUs by capacity type. */}}
{{- define "gpu-autoscaler.mix" -}}
{{- if and .multiTier.enabled .spot.enabled -}}
{{- if ne 100 (add (int .multiTier.spotPercentage) (int .multiTier.onDemandPercentage) (int .multiTier.reservedPercentage) | int) }}
{{- fail "autoscaling.multiTier: spotPercentage, onDemandPercentage and reservedPercentage do not add up to 100; raise or lower one of them" }}
{{- end -}}
spot_ratio = {{ divf .multiTier.spotPercentage 100 }}
on_demand_ratio = {{ divf .multiTier.onDemandPercentage 100 }}
reserved_ratio = {{ divf .multiTier.reservedPercentage 100 }}
{{- else if .spot.enabled -}}
spot_ratio = {{ divf .spot.targetPercentage 100 }}
on_demand_ratio = {{ divf (sub 100 (int .spot.targetPercentage)) 100 }}
reserved_ratio = 0
{{- else -}}
{{- $reserved := ternary (int .multiTier.reservedPercentage) 0 .multiTier.enabled -}}
spot_ratio = 0
on_demand_ratio = {{ divf (sub 100 $reserved) 100 }}
reserved_ratio = {{ divf $reserved 100 }}
{{- end }}
{{- end }}

{{- define "gpu-autoscaler.pool" -}}
{{- $pool := .pool -}}
{{- $types := list }}
{{- $kind := $pool.capacityType | default "mixed" }}
{{- if ne $kind "mixed" }}{{ $types = list $kind }}{{ end }}
{{- if hasKey $pool "spotPercentage" }}
{{- if ne $kind "mixed" }}
{{- fail (printf "autoscaling.nodePools: %s has capacityType %s; spotPercentage is for mixed ones" $pool.name $kind) }}
{{- else if eq 100 (int $pool.spotPercentage) }}{{ $types = list "spot" }}
{{- else if eq 0 (int $pool.spotPercentage) }}{{ $types = list "on-demand" "reserved" }}
{{- else }}
{{- fail (printf "autoscaling.nodePools: %s asks for a share of spot of its own; shares are the cluster's (autoscaling.spot.targetPercentage), a pool takes 0, 100 or all" $pool.name) }}
{{- end }}
{{- end }}
{{- if not .isSpotOn }}
{{- if eq (join "," $types) "spot" }}
{{- fail (printf "autoscaling.nodePools: %s wants spot, and autoscaling.spot.enabled is off; switch it on, or give the pool another capacityType" $pool.name) }}
{{- end }}
{{- if not $types }}{{ $types = list "on-demand" "reserved" }}{{ end }}
{{- end -}}
name = {{ $pool.name | toJson }}
priority = {{ int ($pool.priority | default 0) }}
instance_types = {{ $pool.instanceTypes | default list | toJson }}
gpu_models = {{ if $pool.gpuType }}{{ list $pool.gpuType | toJson }}{{ else }}[]{{ end }}
zones = {{ $pool.availabilityZones | default list | toJson }}
capacity_types = {{ $types | toJson }}
{{- if hasKey $pool "maxSize" }}
nodes_count_max = {{ int $pool.maxSize }}
{{- end }}
labels = { {{- range $index, $key := keys ($pool.labels | default dict) | sortAlpha }}{{ if $index }},{{ end }} {{ $key | toJson }} = {{ get $pool.labels $key | toJson }}{{ end }} }
{{- end }}
