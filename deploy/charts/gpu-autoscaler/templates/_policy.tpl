{{/* Policy file: keys under `policy`, or generated from the values under `autoscaling`. */}}
{{- define "gpu-autoscaler.policy" -}}
{{- $auto := .Values.autoscaling }}
{{- $keys := omit .Values.policy "text" "shadow" }}
{{- if .Values.policy.text }}
{{- if $keys }}
{{- fail (printf "policy.text: replaces all keys of the policy, but policy.%s is set as well; move it into policy.text" (keys $keys | sortAlpha | first)) }}
{{- end }}
{{- if and (not $auto.enabled) (not (regexMatch "(?m)^is_frozen *= *true" .Values.policy.text)) -}}
is_frozen = true
{{ end }}
{{- .Values.policy.text }}
{{- else }}
{{- if and $keys.pools $auto.nodePools }}
{{- fail "policy.pools: replaces autoscaling.nodePools, but both are set; remove one" }}
{{- end }}
{{- $policy := mergeOverwrite (include "gpu-autoscaler.valuesPolicy" . | fromYaml) (deepCopy $keys) }}
{{- if not $auto.enabled }}{{ $_ := set $policy "is_frozen" true }}{{ end }}
{{- range $key, $value := $policy }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "gpu-autoscaler.literal" $value }}
{{- end }}
{{- end }}
{{- range $table, $fields := $policy }}
{{- if kindIs "map" $fields }}

[{{ $table }}]
{{- range $key, $value := $fields }}
{{- if not (kindIs "invalid" $value) }}
{{ toJson $key }} = {{ include "gpu-autoscaler.literal" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The values under `autoscaling` as keys of the policy, in YAML. Invalid combinations fail with the next step. */}}
{{- define "gpu-autoscaler.valuesPolicy" -}}
{{- $auto := .Values.autoscaling -}}
pending_pod_timeout_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleUp.pendingPodTimeout }}
scale_down_cooldown_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleDown.cooldown }}
nodes_count_min: {{ int $auto.limits.minNodes }}
nodes_count_max: {{ int $auto.limits.maxNodes }}
limits:
  scale_up_cooldown_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleUp.cooldown }}
utilization:
  high_ratio: {{ $auto.scaleUp.threshold }}
  low_ratio: {{ $auto.scaleDown.threshold }}
spot:
  capacity_pool_gpu_ratio_max: {{ if $auto.spot.diversify }}0.5{{ else }}1{{ end }}
  mix: {{- include "gpu-autoscaler.mix" $auto | nindent 4 }}
forecast:
  is_on: {{ $auto.predictive.enabled }}
  lookback_hours: {{ mul 24 (int $auto.predictive.lookbackDays) }}
  confidence_ratio_min: {{ $auto.predictive.confidenceThreshold }}
  long_rise_quantile_ratio: {{ $auto.predictive.preWarmThreshold }}
pools:
{{- range default (list (dict "name" "default")) $auto.nodePools }}
  - {{- include "gpu-autoscaler.pool" (dict "pool" . "isSpotOn" $auto.spot.enabled) | nindent 4 }}
{{- end }}
{{- end }}

{{/* GPU ratios by capacity type. */}}
{{- define "gpu-autoscaler.mix" -}}
{{- $weights := include "gpu-autoscaler.weights" . | fromYaml }}
{{- if and .multiTier.enabled .spot.enabled -}}
{{- if ne 100 (add (int .multiTier.spotPercentage) (int .multiTier.onDemandPercentage) (int .multiTier.reservedPercentage) | int) }}
{{- fail "autoscaling.multiTier: the sum of spotPercentage, onDemandPercentage and reservedPercentage is not 100; correct one of them" }}
{{- end -}}
{{- $spot := $weights.spot | default .multiTier.spotPercentage | float64 }}
{{- $reserved := minf .multiTier.reservedPercentage (subf 100 $spot) -}}
spot_ratio: {{ divf $spot 100 }}
on_demand_ratio: {{ divf (subf 100 $spot $reserved) 100 }}
reserved_ratio: {{ divf $reserved 100 }}
{{- else if .spot.enabled -}}
{{- $spot := $weights.spot | default .spot.targetPercentage | float64 -}}
spot_ratio: {{ divf $spot 100 }}
on_demand_ratio: {{ divf (subf 100 $spot) 100 }}
reserved_ratio: 0
{{- else -}}
{{- $reserved := ternary (int .multiTier.reservedPercentage) 0 .multiTier.enabled -}}
spot_ratio: 0
on_demand_ratio: {{ divf (sub 100 $reserved) 100 }}
reserved_ratio: {{ divf $reserved 100 }}
{{- end }}
{{- end }}

{{/* `spot`: spot percentage averaged over mixed pools, weighted by maximum size; empty if no pool sets spotPercentage. Same
     rule as core/policy/documents.py for AutoscalingPolicies. */}}
{{- define "gpu-autoscaler.weights" -}}
{{- $auto := . }}{{ $isSet := false }}{{ $sizes := 0 }}{{ $weighted := 0.0 }}
{{- $default := ternary .multiTier.spotPercentage .spot.targetPercentage .multiTier.enabled }}
{{- range .nodePools }}
{{- if eq "mixed" (.capacityType | default "mixed") }}
{{- $share := ternary .spotPercentage $default (hasKey . "spotPercentage") }}
{{- if and (hasKey . "spotPercentage") (ne 0 (int $share)) (ne 100 (int $share)) }}{{ $isSet = true }}{{ end }}
{{- $size := int (.maxSize | default $auto.limits.maxNodes) }}
{{- $sizes = add $sizes $size }}{{ $weighted = addf $weighted (mulf $share $size) }}
{{- end }}
{{- end }}
{{- if and $isSet (gt (int $sizes) 0) }}
spot: {{ round (divf $weighted $sizes) 4 }}
{{- end }}
{{- end }}

{{- define "gpu-autoscaler.pool" -}}
{{- $pool := .pool -}}
{{- $types := list }}
{{- $kind := $pool.capacityType | default "mixed" }}
{{- if ne $kind "mixed" }}{{ $types = list $kind }}{{ end }}
{{- if hasKey $pool "spotPercentage" }}
{{- if ne $kind "mixed" }}
{{- fail (printf "autoscaling.nodePools: %s has capacityType %s; spotPercentage requires capacityType mixed" $pool.name $kind) }}
{{- else if eq 100 (int $pool.spotPercentage) }}{{ $types = list "spot" }}
{{- else if eq 0 (int $pool.spotPercentage) }}{{ $types = list "on-demand" "reserved" }}
{{- end }}
{{- end }}
{{- if not .isSpotOn }}
{{- if eq (join "," $types) "spot" }}
{{- fail (printf "autoscaling.nodePools: %s requires spot, but autoscaling.spot.enabled is false; set it to true, or change the pool's capacityType" $pool.name) }}
{{- end }}
{{- if not $types }}{{ $types = list "on-demand" "reserved" }}{{ end }}
{{- end -}}
name: {{ $pool.name | toJson }}
priority: {{ int ($pool.priority | default 0) }}
instance_types: {{ $pool.instanceTypes | default list | toJson }}
gpu_models: {{ if $pool.gpuType }}{{ list $pool.gpuType | toJson }}{{ else }}[]{{ end }}
zones: {{ $pool.availabilityZones | default list | toJson }}
capacity_types: {{ $types | toJson }}
nodes_count_min: {{ int ($pool.minSize | default 0) }}
{{- if hasKey $pool "maxSize" }}
nodes_count_max: {{ int $pool.maxSize }}
{{- end }}
labels: {{ $pool.labels | default dict | toJson }}
{{- end }}
