package auth

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cloche-dev/cloche/internal/atomicfile"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// keyBytes is the length of an AES-256 key.
const keyBytes = 32

// Key seals stored secrets with AES-256-GCM. It is safe for concurrent use.
type Key struct{ gcm cipher.AEAD }

// OpenKey reads the key file "key" in dir, and makes both if they do not exist:
// dir with mode 0700, the file with 0600. The caller holds the lock of the data
// directory. A file that others may read, or of another length, is an error.
func OpenKey(dir string) (*Key, error) {
	path := filepath.Join(dir, "key")
	raw, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = makeKey(path)
	}
	if err != nil {
		return nil, fmt.Errorf("secrets key: %w", err)
	}
	block, err := aes.NewCipher(raw)
	if err != nil {
		return nil, fmt.Errorf("secrets key: %w", err)
	}
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("secrets key: %w", err)
	}
	return &Key{gcm: gcm}, nil
}

func readKey(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %#o and must be readable by its owner alone; run chmod 600 on it", path, mode)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(raw) != keyBytes {
		return nil, fmt.Errorf("%s has %d bytes instead of %d; put back the right one", path, len(raw), keyBytes)
	}
	return raw, nil
}

func makeKey(path string) ([]byte, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	raw := make([]byte, keyBytes)
	if _, err := rand.Read(raw); err != nil {
		return nil, err
	}
	failpoint.Here("auth/key/before-write")
	if err := atomicfile.Write(path, raw, 0o600); err != nil {
		return nil, err
	}
	failpoint.Here("auth/key/after-write")
	return raw, nil
}

// Seal encrypts plain. The result opens only with the same binding, which is
// not part of it.
func (k *Key) Seal(plain, binding []byte) ([]byte, error) {
	return k.gcm.Seal(nil, nil, plain, binding), nil
}

// Open decrypts what Seal returned. Anything else is an error.
func (k *Key) Open(sealed, binding []byte) ([]byte, error) {
	plain, err := k.gcm.Open(nil, nil, sealed, binding)
	if err != nil {
		return nil, fmt.Errorf("sealed value: %w", err)
	}
	return plain, nil
}
