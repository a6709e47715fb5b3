package cloche

import "time"

// DefaultImage is the name of the image that a sandbox gets unless it asks for
// another.
const DefaultImage = "universal"

// Image is a read-only root file system that is complete on this host. It is
// persisted, and never changes once it is listed.
type Image struct {
	ID        ImageID     `json:"id"`
	Name      string      `json:"name"`   // "universal", or the repository and tag it was pulled by
	Digest    string      `json:"digest"` // "sha256:" + hex over the tree's content, or the manifest's digest
	SizeBytes int64       `json:"sizeBytes"`
	Files     int64       `json:"files"`
	CreatedAt time.Time   `json:"createdAt"`
	Config    ImageConfig `json:"config"`
}

// Reference is the digest-pinned name that clients see.
func (i *Image) Reference() string { return i.Name + "@" + i.Digest }

// ImageConfig is what the image says about how to run in it.
type ImageConfig struct {
	User     string             `json:"user"`    // default user; "" = root
	WorkDir  string             `json:"workDir"` // "" = "/"
	Env      map[string]string  `json:"env,omitempty"`
	Runtimes map[string]Runtime `json:"runtimes,omitempty"` // by name: "node24"
}

// Runtime is a language runtime that an image offers to legacy clients.
type Runtime struct {
	Path string `json:"path"` // directory that comes first on PATH
	User string `json:"user"` // default user with this runtime
}
