{{/* What no schema can say. */}}
{{- define "gpu-autoscaler.checks" -}}
{{- $code := include "gpu-autoscaler.code" . | fromYaml }}
{{- if not (has .Values.autoscaling.provider $code.providers) }}
{{- fail (printf "autoscaling.provider: this version has no driver for %s; it has %s" .Values.autoscaling.provider (join ", " $code.providers)) }}
{{- end }}
{{- if not (hasPrefix "sqlite:////" .Values.store.url) }}
{{- fail "store.url: this version keeps the store of record in SQLite (sqlite:////var/lib/gpu-autoscaler/store.db), on one volume and one node; PostgreSQL is not here yet" }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.external.servers) }}
{{- fail "nats.external.servers: names no broker, and nats.enabled is off; name host:port of one, or switch it on" }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.passwordsSecret) }}
{{- fail "nats.passwordsSecret: a broker of yours has users of yours; name the Secret with a password for each user of files/users.conf" }}
{{- end }}
{{- if and (not .Values.gateway.tokenReview) (not .Values.gateway.tokensSecret) (not (include "gpu-autoscaler.isSimulated" .)) }}
{{- fail "gateway: nobody would be let in; switch tokenReview on, or name a tokensSecret" }}
{{- end }}
{{- end }}
