{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* The driver name is part of the interface: selectors, device classes and tools are keyed on it. */ -}}
{{- define "partage.driverName" -}}gpu.nvidia.com{{- end -}}

{{- define "partage.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* Names of releases may have dots, and none may come before the "-" that follows. */ -}}
{{- define "partage.fullname" -}}
{{- $name := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if not (contains (include "partage.name" .) $name) -}}
{{- $name = printf "%s-%s" $name (include "partage.name" .) -}}
{{- end -}}
{{- regexReplaceAll "[.-]+$" (trunc 40 $name) "" -}}
{{- end -}}

{{- define "partage.selectorLabels" -}}
app.kubernetes.io/name: {{ include "partage.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "partage.labels" -}}
{{ include "partage.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "partage.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (printf "%s-gpu-kubelet-plugin" (include "partage.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "partage.supervisorAccountName" -}}
{{- default (printf "%s-mps-supervisor" (include "partage.fullname" .)) .Values.mpsSupervisor.serviceAccountName -}}
{{- end -}}

{{- define "partage.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /*
Where the DaemonSets run, and the job that guards them. Arguments: the section of values;
whether nodes must be those that it chooses. The last of them may have left before the job runs.
*/ -}}
{{- define "partage.placement" -}}
{{- $plugin := index . 0 -}}
{{- $chosen := index . 1 -}}
{{- $labelled := and $chosen $plugin.gpuNodesOnly -}}
{{- $selector := deepCopy (default dict $plugin.nodeSelector) -}}
{{- if not $chosen -}}
{{- $selector = pick $selector "kubernetes.io/os" "kubernetes.io/arch" -}}
{{- else if $plugin.gpuOperatorClient -}}
{{- $selector = set $selector "nvidia.com/gpu.deploy.client" "true" -}}
{{- end -}}
{{- with $selector -}}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{ end -}}
affinity:
{{- if and $chosen $plugin.affinity }}
  {{- toYaml $plugin.affinity | nindent 2 }}
{{- else }}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      {{- /* One of the terms must match. The labels of NFD, with the GPU operator's configuration and with its own; of the operator; of GKE. */}}
      {{- range (ternary (list "feature.node.kubernetes.io/pci-10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" "feature.node.kubernetes.io/pci-0302_10de.present" "nvidia.com/gpu.present" "cloud.google.com/gke-accelerator") (list "") $labelled) }}
      - matchExpressions:
        {{- if hasPrefix "cloud.google.com" . }}
        - {key: {{ . }}, operator: Exists}
        {{- else if . }}
        - {key: {{ . }}, operator: In, values: ["true"]}
        {{- end }}
        # No machine is behind these.
        - {key: type, operator: NotIn, values: [virtual-kubelet, kwok]}
        - {key: eks.amazonaws.com/compute-type, operator: NotIn, values: [fargate]}
      {{- end }}
{{- end }}
{{- with $plugin.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /*
Where the plugin sees a host path. Arguments: path and driverRoot on the host;
default, the path that every privileged container already has; mount, where
the DaemonSet mounts a path that is neither that nor inside the driver root.
*/ -}}
{{- define "partage.containerPath" -}}
{{- $path := clean .path -}}
{{- $driverRoot := clean .driverRoot -}}
{{- if eq $path .default -}}
{{- .default -}}
{{- else if eq $path $driverRoot -}}
/driver-root
{{- else if hasPrefix (printf "%s/" (trimSuffix "/" $driverRoot)) $path -}}
{{- printf "/driver-root/%s" (trimPrefix "/" (trimPrefix $driverRoot $path)) -}}
{{- else -}}
{{- .mount -}}
{{- end -}}
{{- end -}}
{{- /* "auto", or where the containers see the device nodes. */ -}}
{{- define "partage.devRoot" -}}
{{- if eq .Values.host.devRoot "auto" -}}
auto
{{- else -}}
{{- include "partage.containerPath" (dict "path" .Values.host.devRoot "driverRoot" .Values.host.driverRoot "default" "/" "mount" "/dev-root") -}}
{{- end -}}
{{- end -}}
{{- /* "true" if the containers have the host's /dev. */ -}}
{{- define "partage.hostDev" -}}
{{- has (include "partage.devRoot" .) (list "auto" "/") -}}
{{- end -}}
{{- define "partage.procRoot" -}}
{{- include "partage.containerPath" (dict "path" .Values.host.procRoot "driverRoot" .Values.host.driverRoot "default" "/proc" "mount" "/proc-root") -}}
{{- end -}}
{{- define "partage.sysRoot" -}}
{{- include "partage.containerPath" (dict "path" .Values.host.sysRoot "driverRoot" .Values.host.driverRoot "default" "/sys" "mount" "/sys-root") -}}
{{- end -}}

{{- define "partage.pluginsDir" -}}{{ clean .Values.host.kubeletDir }}/plugins{{- end -}}
{{- define "partage.podResourcesDir" -}}{{ clean .Values.host.kubeletDir }}/pod-resources{{- end -}}
{{- define "partage.registrarDir" -}}{{ clean .Values.host.kubeletDir }}/plugins_registry{{- end -}}

{{- /* A duration of Go's as a number of seconds. */ -}}
{{- define "partage.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9]+(\\.[0-9]+)?(ms|s|m|h)" . -1 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $seconds = addf $seconds (mulf (float64 (trimSuffix $unit .)) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit)) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{- /*
"true" if the sharing policy offers partitions of a MIG profile on some GPU that has it.
Arguments: the policy; the profile.
*/ -}}
{{- define "partage.offersProfile" -}}
{{- $policy := index . 0 -}}
{{- $profile := index . 1 -}}
{{- $offers := list (default dict $policy.default) -}}
{{- range $policy.rules -}}
{{- $offers = append $offers .offer -}}
{{- end -}}
{{- $offered := false -}}
{{- range $offers -}}
{{- $mig := default dict .mig -}}
{{- $partitions := or (not (hasKey . "kinds")) (has "mig" .kinds) -}}
{{- $variant := regexMatch "gb[+-]" $profile -}}
{{- $listed := ternary (has $profile $mig.profiles) (or (not $variant) (default false $mig.variants)) (hasKey $mig "profiles") -}}
{{- $offered = or $offered (and $partitions $listed) -}}
{{- end -}}
{{- $offered -}}
{{- end -}}

{{- /*
Classes that deviceClasses.mig.extendedResources adds to those in migProfiles, as JSON: the
MIG profile of each class. What the values name themselves comes first. NVIDIA's device
plugin writes a dot for each plus sign.
*/ -}}
{{- define "partage.extendedMigClasses" -}}
{{- $classes := dict -}}
{{- if and (eq .Values.deviceClasses.mig.extendedResources "Auto") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) -}}
{{- $named := default dict .Values.deviceClasses.migProfiles -}}
{{- $served := list .Values.deviceClasses.gpu.extendedResourceName .Values.deviceClasses.mps.extendedResourceName .Values.deviceClasses.timeslice.extendedResourceName -}}
{{- range $named -}}
{{- $served = append $served .extendedResourceName -}}
{{- end -}}
{{- range .Files.Get "mig/profiles.yaml" | fromYamlArray -}}
{{- $name := include "partage.migResource" . -}}
{{- $class := printf "%s.nvidia.com" $name -}}
{{- if not (or (hasKey $named $class) (has (printf "nvidia.com/%s" $name) $served) (ne (include "partage.offersProfile" (list $.Values.sharingPolicy .)) "true")) -}}
{{- $_ := set $classes $class . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $classes -}}
{{- end -}}
{{- /*
The classes that stand for the extended resources of whole GPUs and of their shares, as JSON: the type of
device and the resource of each class. They are classes of their own because they leave out nodes whose
kubelet does not know such resources, which the classes for claims do not.
*/ -}}
{{- define "partage.resourceClasses" -}}
{{- $classes := dict -}}
{{- range $type := list "gpu" "mps" "timeslice" -}}
{{- with (get $.Values.deviceClasses $type).extendedResourceName -}}
{{- $_ := set $classes (printf "%s.resource.partage.dev" $type) (dict "type" $type "extendedResourceName" .) -}}
{{- end -}}
{{- end -}}
{{- toJson $classes -}}
{{- end -}}
{{- /* Classes, as JSON, with those that stand for the extended resources of the same devices. Arguments: all values; the classes. */ -}}
{{- define "partage.withResources" -}}
{{- $resources := include "partage.resourceClasses" (index . 0) | fromJson -}}
{{- $classes := index . 1 -}}
{{- range $type, $class := dict "gpu" "gpu.nvidia.com" "mps" "mps.partage.dev" "timeslice" "timeslice.partage.dev" -}}
{{- $name := printf "%s.resource.partage.dev" $type -}}
{{- if and (has $class $classes) (hasKey $resources $name) -}}
{{- $classes = append $classes $name -}}
{{- end -}}
{{- end -}}
{{- uniq $classes | toJson -}}
{{- end -}}
{{- /* All classes with devices of this driver that are known, as JSON. */ -}}
{{- define "partage.requestClasses" -}}
{{- $classes := concat (list "gpu.nvidia.com" "mig.nvidia.com" "mps.partage.dev" "timeslice.partage.dev" "observer.partage.dev") (keys (default dict .Values.deviceClasses.migProfiles) | sortAlpha) (keys (include "partage.extendedMigClasses" . | fromJson) | sortAlpha) .Values.requestPolicy.deviceClasses | uniq -}}
{{- include "partage.withResources" (list . $classes) -}}
{{- end -}}
{{- /*
The resources by which pods get devices of these classes without a claim, as JSON: the class of each. Kubernetes has one
for every class, and classes may name another one.
*/ -}}
{{- define "partage.classOfResource" -}}
{{- $all := dict -}}
{{- range include "partage.requestClasses" . | fromJsonArray -}}
{{- $_ := set $all (printf "deviceclass.resource.kubernetes.io/%s" .) . -}}
{{- end -}}
{{- range $name, $class := merge (include "partage.resourceClasses" . | fromJson) (default dict .Values.deviceClasses.migProfiles) -}}
{{- with $class.extendedResourceName -}}
{{- $_ := set $all . $name -}}
{{- end -}}
{{- end -}}
{{- range $name, $profile := include "partage.extendedMigClasses" . | fromJson -}}
{{- $_ := set $all (printf "nvidia.com/%s" (include "partage.migResource" $profile)) $name -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}
{{- define "partage.migResource" -}}mig-{{ . | replace "+" "." }}{{- end -}}

{{- /* Where a program answers the probes, in a folder of the pod's own. */ -}}
{{- define "partage.healthSocket" -}}/run/health/health.sock{{- end -}}
{{- define "partage.healthVolume" -}}
# In memory: a full disk must not keep the pod from starting.
emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end -}}

{{- /*
What a program needs to speak to the API server, for /var/run/secrets/kubernetes.io/serviceaccount.
It is what Kubernetes would mount there, except that the token ends after an hour: that of
Kubernetes, which is asked for with 3607 seconds, is good for a year by default, in case
that a program reads it only once. The kubelet renews it after 80 % of the time, so an API
server may be away for 12 minutes before one ends.
*/ -}}
{{- define "partage.tokenVolume" -}}
projected:
  sources:
  - serviceAccountToken:
      path: token
      expirationSeconds: 3600
  - configMap:
      name: kube-root-ca.crt
      items:
      - {key: ca.crt, path: ca.crt}
  - downwardAPI:
      items:
      - path: namespace
        fieldRef: {fieldPath: metadata.namespace}
{{- end -}}
