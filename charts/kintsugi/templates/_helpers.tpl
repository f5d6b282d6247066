{{/* The BlendService's name, which is the prefix of all other names. */}}
{{- define "kintsugi.name" -}}
{{- $name := default .Release.Name .Values.nameOverride -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "%q is not a valid name of a BlendService: set nameOverride to at most 40 characters of a-z, 0-9 and -, beginning with a letter" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* Call with (list $ component). */}}
{{- define "kintsugi.labels" -}}
{{- $root := first . -}}
{{ include "kintsugi.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: kintsugi
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with omit $root.Values.commonLabels "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "app.kubernetes.io/part-of" "helm.sh/chart" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The immutable labels of pods. Call with (list $ component). */}}
{{- define "kintsugi.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: kintsugi-{{ last . }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* Registry and folder of the images. The schema refuses an empty value, unless validation is skipped. */}}
{{- define "kintsugi.repository" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository is not set: make images REPOSITORY=registry/kintsugi builds them; push them, set image.repository=registry/kintsugi" -}}
{{- end -}}
{{- .Values.image.repository | trimSuffix "/" -}}
{{- end }}

{{- define "kintsugi.operatorImage" -}}
{{- $repository := printf "%s/operator" (include "kintsugi.repository" .) -}}
{{- if .Values.image.operatorDigest -}}
{{- printf "%s@%s" $repository .Values.image.operatorDigest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}

{{- define "kintsugi.servingRepository" -}}
{{- $serving := .Values.image.serving -}}
{{- if eq $serving "auto" -}}
{{- $serving = ternary "serving-gpu" "serving-cpu" (gt (int .Values.engines.gpus) 0) -}}
{{- else if ne (eq $serving "serving-gpu") (gt (int .Values.engines.gpus) 0) -}}
{{- fail (printf "image.serving is %s, but engines.gpus is %d: change one of them" $serving (int .Values.engines.gpus)) -}}
{{- end -}}
{{- printf "%s/%s" (include "kintsugi.repository" .) $serving -}}
{{- end }}

{{- define "kintsugi.servingImage" -}}
{{- $repository := include "kintsugi.servingRepository" . -}}
{{- if .Values.image.servingDigest -}}
{{- printf "%s@%s" $repository .Values.image.servingDigest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}

{{/* The Secret with hashed tokens; empty without authentication. */}}
{{- define "kintsugi.tokensSecret" -}}
{{- if .Values.gateway.tokensSecret -}}
{{- .Values.gateway.tokensSecret -}}
{{- else if not .Values.gateway.insecure -}}
{{- include "kintsugi.name" . }}-tokens
{{- end -}}
{{- end }}

{{/* "true" if the chart has to create a token. */}}
{{- define "kintsugi.makesToken" -}}
{{- and .Values.service.enabled (not .Values.gateway.tokensSecret) (not .Values.gateway.insecure) -}}
{{- end }}

{{/* The Secret with a token for clients; empty if the chart knows none. */}}
{{- define "kintsugi.clientSecret" -}}
{{- if .Values.test.tokenSecret -}}
{{- .Values.test.tokenSecret -}}
{{- else if and (not .Values.gateway.tokensSecret) (not .Values.gateway.insecure) -}}
{{- include "kintsugi.name" . }}-client
{{- end -}}
{{- end }}

{{- define "kintsugi.operatorAccount" -}}
{{- default (printf "%s-operator" (include "kintsugi.name" .)) .Values.operator.podTemplate.serviceAccountName -}}
{{- end }}

{{/* The namespaces that the operator manages, as JSON; none: all. */}}
{{- define "kintsugi.managedNamespaces" -}}
{{- if eq .Values.operator.scope "Cluster" -}}
[]
{{- else -}}
{{- concat (list .Release.Namespace) .Values.operator.namespaces | uniq | toJson -}}
{{- end -}}
{{- end }}

{{/* The security context of the chart's own pods, as the `restricted` pod security standard requires. */}}
{{- define "kintsugi.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kintsugi.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kintsugi.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where the chart's own pods run, and before whom. Call with operator.podTemplate. */}}
{{- define "kintsugi.placement" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $ $field }}
{{ $field }}:{{ if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kintsugi.url" -}}
{{- $scheme := ternary "https" "http" (ne .Values.gateway.tlsSecret "") -}}
{{- printf "%s://%s-http.%s.svc:%d" $scheme (include "kintsugi.name" .) .Release.Namespace (int .Values.gateway.httpPort) -}}
{{- end }}

{{- define "kintsugi.modelName" -}}
{{- default (.Values.model.path | trimSuffix "/" | base) .Values.model.name -}}
{{- end }}
