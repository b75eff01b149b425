{{- define "gpu-autoscaler.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "gpu-autoscaler.fullname" -}}
{{- $name := include "gpu-autoscaler.name" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "gpu-autoscaler.selector" -}}
app.kubernetes.io/name: {{ include "gpu-autoscaler.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpu-autoscaler.labels" -}}
{{ include "gpu-autoscaler.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "gpu-autoscaler.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "gpu-autoscaler.code" -}}
{{ .Files.Get "files/code.yaml" }}
{{- end }}

{{/* "true" if cluster and cloud are simulated in a pod of this release. */}}
{{- define "gpu-autoscaler.isSimulated" -}}
{{- if and (eq .Values.autoscaling.provider "sim") (not .Values.autoscaling.sim.url) }}true{{ end }}
{{- end }}

{{- define "gpu-autoscaler.simulationUrl" -}}
http://{{ include "gpu-autoscaler.fullname" . }}-simcluster:8001
{{- end }}

{{- define "gpu-autoscaler.isSqlite" -}}
{{- if not .Values.store.postgresql.url }}true{{ end }}
{{- end }}

{{/* The volume of the SQLite file is an object of this release. */}}
{{- define "gpu-autoscaler.ownsVolume" -}}
{{- if and (include "gpu-autoscaler.isSqlite" .) (not .Values.store.sqlite.existingClaim) }}true{{ end }}
{{- end }}

{{- define "gpu-autoscaler.hasCloudFiles" -}}
{{- if and (eq .Values.autoscaling.provider "aws") (or .Values.autoscaling.aws.userData .Values.autoscaling.aws.prices .Values.autoscaling.aws.spotAdvisor.data) }}true{{ end }}
{{- if eq .Values.autoscaling.provider "karpenter" }}true{{ end }}
{{- if and (eq .Values.autoscaling.provider "azure") (or .Values.autoscaling.azure.machine .Values.autoscaling.azure.userData .Values.autoscaling.azure.prices) }}true{{ end }}
{{- if and (eq .Values.autoscaling.provider "gcp") .Values.autoscaling.gcp.prices }}true{{ end }}
{{- end }}

{{- define "gpu-autoscaler.jobsNamespace" -}}
{{- if include "gpu-autoscaler.isSimulated" . }}default{{ else }}{{ .Values.jobs.namespace | default .Release.Namespace }}{{ end }}
{{- end }}

{{/* Quoted names of clients whose requests carry their name, as JSON. */}}
{{- define "gpu-autoscaler.clientNames" -}}
{{- $names := list }}
{{- range .Values.nats.clients }}{{ $names = append $names (printf "%q" .name) }}{{ end }}
{{- toJson $names }}
{{- end }}

{{/* The broker's users, with the auth callout if it is enabled. */}}
{{- define "gpu-autoscaler.usersConf" -}}
{{- $users := .Files.Get "files/users.conf" }}
{{- if .Values.nats.authCallout.enabled }}
{{- $broker := (include "gpu-autoscaler.code" . | fromYaml).broker }}
{{- $callout := printf "authorization {\n  timeout: %v\n  auth_callout {issuer: %s, auth_users: [%s]}" $broker.calloutSeconds .Values.nats.authCallout.issuer (concat (keys $broker.passwordVariables | sortAlpha) (include "gpu-autoscaler.clientNames" . | fromJsonArray) | join ", ") }}
{{- $users = replace "authorization {" $callout $users }}
{{- end }}
{{- $clients := "" }}
{{- range $number, $client := .Values.nats.clients }}
{{- $token := $client.name | b64enc | replace "+" "-" | replace "/" "_" | trimAll "=" }}
{{- $publish := printf "[\n          \"client_request.job_requested.%s\"\n          \"client_request.job_cancel_requested.%s\"\n        ]" $token $token }}
{{- $clients = printf "%s    {\n      user: %q\n      password: $NATS_PASSWORD_CLIENT_%d\n      permissions: {\n        publish: {allow: %s}\n        subscribe: {allow: [\n          \"_INBOX.>\"\n        ]}\n      }\n    }\n" $clients $client.name $number $publish }}
{{- end }}
{{- $end := "  ]\n}\n" }}
{{- $users = printf "%s%s%s" (trimSuffix $end $users) $clients $end }}
{{- $users }}
{{- end }}

{{/* "true" if services log in with a credentials file instead of a password. */}}
{{- define "gpu-autoscaler.natsCredentials" -}}
{{- if ((.Values.settings | default dict).nats | default dict).credentials_path }}true{{ end }}
{{- end }}

{{/* A value in TOML, maps and lists on one line. YAML knows no integers here: whole numbers are written without a point. */}}
{{- define "gpu-autoscaler.literal" -}}
{{- if kindIs "map" . }}
{{- $items := list }}
{{- range $key, $item := . }}{{ if not (kindIs "invalid" $item) }}{{ $items = append $items (printf "%s = %s" (toJson $key) (include "gpu-autoscaler.literal" $item)) }}{{ end }}{{ end -}}
{ {{- join ", " $items -}} }
{{- else if kindIs "slice" . }}
{{- $items := list }}
{{- range . }}{{ $items = append $items (include "gpu-autoscaler.literal" .) }}{{ end -}}
[{{ join ", " $items }}]
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}
{{- else }}{{ toJson . }}
{{- end }}
{{- end }}

{{- define "gpu-autoscaler.passwordsSecret" -}}
{{ .Values.nats.passwordsSecret | default (printf "%s-nats-users" (include "gpu-autoscaler.fullname" .)) }}
{{- end }}

{{- define "gpu-autoscaler.tokensSecret" -}}
{{ .Values.gateway.tokensSecret | default (printf "%s-gateway" (include "gpu-autoscaler.fullname" .)) }}
{{- end }}

{{/* Seconds of a number or a duration: 90, 90s, 3m, 1h30m. */}}
{{- define "gpu-autoscaler.seconds" -}}
{{- $text := toString . }}
{{- if regexMatch "^[0-9]+$" $text }}{{ $text }}
{{- else }}
{{- $sum := 0 }}
{{- range regexFindAll "[0-9]+[smh]" $text -1 }}
{{- $unitSeconds := dict "s" 1 "m" 60 "h" 3600 }}
{{- $sum = add $sum (mul (atoi (regexFind "[0-9]+" .)) (get $unitSeconds (regexFind "[smh]" .))) }}
{{- end }}{{ $sum }}
{{- end }}
{{- end }}

{{/* NATS URLs, one per server. `login`: user:password@, or empty. */}}
{{- define "gpu-autoscaler.natsUrl" -}}
{{- $root := .root }}{{ $login := .login }}{{ $urls := list }}
{{- if $root.Values.nats.enabled }}
{{- $name := printf "%s-nats" (include "gpu-autoscaler.fullname" $root) }}
{{- range $number := until (int $root.Values.nats.replicas) }}
{{- $urls = append $urls (printf "%s://%s%s-%d.%s.%s.svc:4222" (ternary "tls" "nats" (not (empty $root.Values.nats.tls.secretName))) $login $name $number $name $root.Release.Namespace) }}
{{- end }}
{{- else }}
{{- range $root.Values.nats.external.servers }}
{{- $urls = append $urls (printf "%s://%s%s" $root.Values.nats.external.scheme $login .) }}
{{- end }}
{{- end }}{{ join "," $urls }}
{{- end }}
